"""Pictures as PNG, painted by matplotlib (the extra `plot`), shape by shape, on light ground."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wholestep.errors import WholestepError
from wholestep.report.palette import LIGHT
from wholestep.report.scene import LOOKS, Box, Dot, Outline, Scene, Text

_PIXELS_PER_INCH = 100
_SCALE = 2  # for screens with fine pixels
_POINTS_PER_PIXEL = 72 / _PIXELS_PER_INCH
_ALIGNMENT = {"start": "left", "middle": "center", "end": "right"}


def check_matplotlib() -> None:
    """Refuse to paint without matplotlib."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise WholestepError(
            "PNG pictures need matplotlib: install it with pip install 'wholestep[plot]', or ask for format='svg'"
        ) from error


def write_png(scene: Scene, path: Path) -> None:
    """Paint a picture; raises `WholestepError` if matplotlib is not installed."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(scene.width / _PIXELS_PER_INCH, scene.height / _PIXELS_PER_INCH))
    figure.patch.set_facecolor(LIGHT["surface"])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.top + scene.height, scene.top)
    for order, shape in enumerate(scene.shapes):
        if isinstance(shape, Text):
            _paint_text(axes, shape, order)
        else:
            axes.add_patch(_patch(shape, order))
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=_PIXELS_PER_INCH * _SCALE)


def _patch(shape: Outline | Box | Dot, order: int) -> Any:
    from matplotlib import patches
    from matplotlib.path import Path as Curve

    look = LOOKS[shape.look]
    width = look.width * _POINTS_PER_PIXEL
    paint: dict[str, Any] = {
        "facecolor": LIGHT[look.fill] if look.fill else "none",
        "edgecolor": LIGHT[look.stroke] if look.stroke else "none",
        "linewidth": width if look.stroke else 0,
        "alpha": look.opacity,
        "joinstyle": "round",
        "zorder": order,
    }
    if look.dash is not None:
        paint["linestyle"] = (0, tuple(length / look.width for length in look.dash))
    if isinstance(shape, Outline):
        points = [*shape.points, shape.points[0]] if shape.is_closed else list(shape.points)
        return patches.PathPatch(Curve(points), **paint)
    if isinstance(shape, Dot):
        return patches.Circle((shape.x, shape.y), shape.radius, **paint)
    # Corners that are rounder than half the box turn it inside out.
    radius = min(shape.radius, shape.width / 2, shape.height / 2)
    style = patches.BoxStyle("round", pad=0, rounding_size=radius) if radius else patches.BoxStyle("square", pad=0)
    return patches.FancyBboxPatch((shape.x, shape.y), shape.width, shape.height, boxstyle=style, **paint)


def _paint_text(axes: Any, shape: Text, order: int) -> None:
    from matplotlib import patheffects

    look = LOOKS[shape.look]
    halo = [patheffects.withStroke(linewidth=4 * _POINTS_PER_PIXEL, foreground=LIGHT["surface"])]
    axes.text(
        shape.x,
        shape.y,
        shape.text,
        color=LIGHT[look.fill],
        fontsize=look.font_size * _POINTS_PER_PIXEL,
        fontweight="bold" if look.is_bold else "normal",
        ha=_ALIGNMENT[shape.anchor],
        va="baseline",
        parse_math=False,
        zorder=order,
        path_effects=halo if look.has_halo else None,
    )
