"""Pictures as data: shapes with named looks, drawn once and rendered as SVG, in a page or on its own, or as PNG.

A shape says what it is (`look`), never which colour: that is the table `LOOKS`, from which all renderings take it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup, escape

from wholestep._output import require_writable, write_output
from wholestep.errors import WholestepError
from wholestep.report.palette import DARK, LIGHT

FORMATS = ("svg", "png")
FONT_SIZE = 12.0
# Of the widest font in use; a little room is better than an overlap.
_CHARACTER_WIDTH = 7.2
_LINE_HEIGHT = 16
_HEADER_HEIGHT = 36
_MARGIN = 24


@dataclass(frozen=True)
class Look:
    """How a shape is painted: names of colours in the palette, "" for none; sizes in pixels."""

    fill: str = ""
    stroke: str = ""
    width: float = 1.0
    opacity: float = 1.0
    dash: tuple[float, float] | None = None
    is_bold: bool = False
    font_size: float = FONT_SIZE
    has_halo: bool = False


LOOKS = {
    "card": Look(fill="surface", stroke="line"),
    "title": Look(fill="ink", is_bold=True, font_size=17.0),
    "note": Look(fill="soft"),
    "caption": Look(fill="ink"),
    "name": Look(fill="ink", is_bold=True),
    "mark": Look(fill="ink", is_bold=True, has_halo=True),
    "rule": Look(stroke="line"),
    "base": Look(stroke="soft"),
    "resident": Look(fill="floor", opacity=0.35),
    "before-area": Look(fill="floor", opacity=0.22),
    "before": Look(stroke="floor", width=1.6),
    "after-area": Look(fill="accent", opacity=0.22),
    "after": Look(stroke="accent", width=1.8),
    "limit": Look(stroke="bad", width=1.5, dash=(6.0, 4.0)),
    "limit-text": Look(fill="bad", is_bold=True, has_halo=True),
    "point": Look(fill="accent", stroke="surface", width=1.5),
    "before-point": Look(fill="floor", stroke="surface", width=1.5),
    "chosen": Look(fill="backward", stroke="surface", width=2.0),
    "track-bar": Look(fill="track"),
    "kept-bar": Look(fill="accent"),
    "again-bar": Look(fill="backward"),
    "box": Look(fill="track", stroke="line"),
    "bad-box": Look(fill="surface", stroke="bad", width=2.0),
    "bad-text": Look(fill="bad", is_bold=True),
    "arrow": Look(stroke="soft", width=1.5),
    "arrow-head": Look(fill="soft"),
    "forward-strip": Look(fill="forward"),
    "backward-strip": Look(fill="backward"),
    "comm-strip": Look(fill="comm"),
    "optimizer-strip": Look(fill="optimizer"),
    "waiting-strip": Look(fill="bad"),
    "before-strip": Look(fill="comm", opacity=0.45),
    "strip-text": Look(fill="surface", is_bold=True),
}


@dataclass(frozen=True)
class Text:
    """A line of text; `anchor` is `start`, `middle` or `end`."""

    x: float
    y: float
    text: str
    look: str = "note"
    anchor: str = "start"


@dataclass(frozen=True)
class Outline:
    """Straight lines from point to point. `title` is shown by browsers when one points at it."""

    points: tuple[tuple[float, float], ...]
    look: str
    is_closed: bool = False
    title: str = ""


@dataclass(frozen=True)
class Box:
    """A rectangle, its corners rounded by `radius`. In a page it leads to the element whose id is `anchor`, if any."""

    x: float
    y: float
    width: float
    height: float
    look: str
    radius: float = 0.0
    title: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Dot:
    """A disc."""

    x: float
    y: float
    radius: float
    look: str
    title: str = ""


Shape = Text | Outline | Box | Dot


@dataclass(frozen=True)
class Scene:
    """A picture: shapes from back to front, y pointing down from `top`, and its content in words."""

    title: str
    description: str
    width: float
    height: float
    shapes: tuple[Shape, ...]
    top: float = 0.0


def text_width(text: str) -> float:
    """About how many pixels a line of text takes."""
    return _CHARACTER_WIDTH * len(text)


def page_svg(scene: Scene) -> Markup:
    """A picture for a page that has `page_css()`; title and description are for those who cannot see it."""
    return Markup(_svg(scene, "", ""))


def page_css() -> str:
    """The looks for a page that declares the palette as variables."""
    return _css(lambda colour: f"var(--{colour})", "svg ")


def file_svg(scene: Scene) -> str:
    """A picture on its own: with a card behind it and its title above, light or dark as the reader likes it."""
    font = f'text {{ font: {FONT_SIZE:g}px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}'
    dark = f"@media (prefers-color-scheme: dark) {{\n{_css(DARK.__getitem__)}}}\n"
    style = f"<style>\n{font}\n{_css(LIGHT.__getitem__)}{dark}</style>"
    return _svg(framed(scene), ' xmlns="http://www.w3.org/2000/svg"', style) + "\n"


def framed(scene: Scene) -> Scene:
    """A picture with a margin, a card behind it, its title and description above."""
    lines = textwrap.wrap(scene.description, int((scene.width - 2 * _MARGIN) / _CHARACTER_WIDTH))
    header = _HEADER_HEIGHT + _LINE_HEIGHT * len(lines)
    top, height = scene.top - header, scene.height + header + 8
    shapes = (
        Box(0.5, top + 0.5, scene.width - 1, height - 1, "card", 12.0),
        Text(_MARGIN, top + 28, scene.title, "title"),
        *(Text(_MARGIN, top + 46 + _LINE_HEIGHT * index, line) for index, line in enumerate(lines)),
    )
    return replace(scene, top=top, height=height, shapes=(*shapes, *scene.shapes))


def check_format(name: str) -> None:
    """Refuse formats that there are not."""
    if name not in FORMATS:
        raise WholestepError(f"pictures are written as {' or '.join(FORMATS)}, not as '{name}'")


def save_scene(scene: Scene, path: Path) -> Path:
    """Write a picture as its file's suffix says, creating folders on the way; PNG takes matplotlib."""
    check_format(path.suffix.removeprefix("."))
    require_writable(path)
    if path.suffix == ".svg":
        return write_output(path, file_svg(scene))
    from wholestep.report.png import write_png

    write_png(framed(scene), path)
    return path


def _svg(scene: Scene, attributes: str, style: str) -> str:
    box = f"0 {scene.top:g} {scene.width:g} {scene.height:g}"
    label = escape(f"{scene.title}. {scene.description}")
    # What is inside an image cannot be reached: a picture that leads somewhere is a group.
    role = "group" if any(isinstance(shape, Box) and shape.anchor for shape in scene.shapes) else "img"
    head = f'<svg{attributes} viewBox="{box}" role="{role}" aria-label="{label}">'
    parts = [head, f"<title>{escape(scene.title)}</title>", style, *map(_element, scene.shapes), "</svg>"]
    return "\n".join(part for part in parts if part)


def _element(shape: Shape) -> str:
    look = f'class="{shape.look}"'
    if isinstance(shape, Text):
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}"'
        return f"<text {look} {place}>{escape(shape.text)}</text>"
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    if isinstance(shape, Outline):
        data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in shape.points) + ("Z" if shape.is_closed else "")
        return f'<path {look} d="{data}">{title}</path>'
    if isinstance(shape, Dot):
        return f'<circle {look} cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}">{title}</circle>'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
    rect = f'<rect {look} {place} rx="{shape.radius:g}">{title}</rect>'
    if not shape.anchor:
        return rect
    return f'<a href="#{escape(shape.anchor)}" aria-label="{escape(shape.title)}">{rect}</a>'


def _css(colour: Callable[[str], str], scope: str = "") -> str:
    """A rule for each look."""
    return "".join(f"{scope}.{name} {{ {_declarations(look, colour)} }}\n" for name, look in LOOKS.items())


def _declarations(look: Look, colour: Callable[[str], str]) -> str:
    parts = [f"fill: {colour(look.fill) if look.fill else 'none'}"]
    if look.stroke:
        parts += [f"stroke: {colour(look.stroke)}", f"stroke-width: {look.width:g}", "stroke-linejoin: round"]
    if look.has_halo:
        parts += ["paint-order: stroke", f"stroke: {colour('surface')}", "stroke-width: 4", "stroke-linejoin: round"]
    if look.opacity != 1:
        parts.append(f"opacity: {look.opacity:g}")
    if look.dash is not None:
        parts.append(f"stroke-dasharray: {look.dash[0]:g} {look.dash[1]:g}")
    if look.is_bold:
        parts.append("font-weight: 650")
    if look.font_size != FONT_SIZE:
        parts.append(f"font-size: {look.font_size:g}px")
    return "; ".join(parts)
