"""Colours by what they are for, on light and on dark ground: for pages, pictures in them and pictures alone."""

from __future__ import annotations

LIGHT = {
    "page": "#f6f7f9",
    "surface": "#ffffff",
    "ink": "#1b2230",
    "soft": "#5b6577",
    "line": "#dfe3ea",
    "track": "#e9ecf1",
    "accent": "#3567d6",
    "forward": "#3567d6",
    "backward": "#bd5716",
    "comm": "#7d4fc4",
    "optimizer": "#15805c",
    "floor": "#8a94a6",
    "code": "#f1f3f7",
    "bad": "#c0392b",
}
DARK = {
    "page": "#12151b",
    "surface": "#1a1f28",
    "ink": "#e6e9ef",
    "soft": "#9aa5b8",
    "line": "#2c3340",
    "track": "#28303c",
    "accent": "#7ba4ff",
    "forward": "#7ba4ff",
    "backward": "#f0935a",
    "comm": "#b796f5",
    "optimizer": "#4fc79b",
    "floor": "#7d889b",
    "code": "#141922",
    "bad": "#ff8f84",
}


def variables() -> str:
    """The colours as CSS variables that follow the reader's colour scheme."""

    def declared(palette: dict[str, str]) -> str:
        return " ".join(f"--{name}: {colour};" for name, colour in palette.items())

    return (
        f":root {{ color-scheme: light dark; {declared(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {declared(DARK)} }} }}\n"
    )
