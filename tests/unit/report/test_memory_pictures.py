"""Pictures of memory plans: labels can be read, figures are the plan's, and files need nothing but themselves."""

from __future__ import annotations

import importlib.util
import itertools
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wholestep
from wholestep.cost import MemoryProfile
from wholestep.errors import WholestepError
from wholestep.graph import Phase
from wholestep.remat import Curve, CurvePoint, KeptValue, MemoryStudy, RematPlan, RepeatedOp
from wholestep.remat.curve import best_points
from wholestep.remat.mincut import NoCutError, WayStop
from wholestep.report import save_curve, save_failing_cut, step_report
from wholestep.report.axes import byte_ticks, count_ticks, share_ticks
from wholestep.report.cut_picture import cut_picture, cut_report
from wholestep.report.memory_pictures import curve_picture, module_picture, module_rows, plan_pictures, timeline_picture
from wholestep.report.memory_plan import memory_sections
from wholestep.report.palette import DARK, LIGHT
from wholestep.report.scene import LOOKS, Dot, Outline, Scene, Text, file_svg, framed, page_svg, text_width
from wholestep.report.summary import OUTSIDE_MODULES, format_bytes

MIB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def compiled(**options: Any) -> Any:
    model = nn.Sequential(*(Block() for _ in range(6)))
    step = wholestep.compile(train_step, **options)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(512, 16))
    return step


@pytest.fixture(name="step", scope="module")
def _step() -> Any:
    return compiled(memory_budget=0.4)


def profile(*live_bytes: int) -> MemoryProfile:
    """Memory over a forward and a backward of equal length, with one MiB of slots."""
    num_forward = len(live_bytes) // 2
    phases = (Phase.FORWARD,) * num_forward + (Phase.BACKWARD,) * (len(live_bytes) - num_forward)
    peak = max(live_bytes)
    return MemoryProfile(live_bytes, phases, MIB, peak, live_bytes.index(peak), "node", ())


def study_of(
    kept: dict[str, int], again: dict[str, float], curve: Curve | None = None, budget_bytes: int | None = None
) -> MemoryStudy:
    """A study of a plan that keeps these bytes and repeats these shares by module."""
    before, after = profile(MIB, 4 * MIB, 6 * MIB, MIB), profile(MIB, 3 * MIB, 2 * MIB, 4 * MIB, MIB)
    plan = RematPlan(
        budget="0.5",
        peak_bytes=4 * MIB,
        unlimited_peak_bytes=6 * MIB,
        repeated_share=sum(again.values()),
        kept=tuple(KeptValue(f"v{index}", module, size, "") for index, (module, size) in enumerate(kept.items())),
        repeated=tuple(
            RepeatedOp(f"o{index}", name, 1, 0, 0, share) for index, (name, share) in enumerate(again.items())
        ),
    )
    known = curve or Curve((CurvePoint(4 * MIB, 0.5), CurvePoint(6 * MIB, 0.0)), CurvePoint(4 * MIB, 0.5))
    return MemoryStudy(plan, known, budget_bytes, before, after, tuple(dict.fromkeys([*kept, *again])))


def texts(scene: Scene) -> list[Text]:
    return [shape for shape in scene.shapes if isinstance(shape, Text)]


def outline(scene: Scene, look: str) -> Outline:
    """The first line of a look; the one in the legend comes later."""
    return next(shape for shape in scene.shapes if isinstance(shape, Outline) and shape.look == look)


def assert_readable(scene: Scene) -> None:
    """No text leaves the picture or covers another one, and nothing is painted in a look that there is not."""
    assert {shape.look for shape in scene.shapes} <= set(LOOKS)
    boxes: list[tuple[float, float, float, float, str]] = []
    for text in texts(scene):
        scale = LOOKS[text.look].font_size / 12
        width = text_width(text.text) * scale
        left = text.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor] * width
        boxes.append((left, text.y - 11 * scale, left + width, text.y + 2, text.text))
    for left, top, right, bottom, text in boxes:
        assert left >= 0, text
        assert right <= scene.width, text
        assert top >= scene.top, text
        assert bottom <= scene.top + scene.height, text
    for one, other in itertools.combinations(boxes, 2):
        is_beside = one[2] <= other[0] or other[2] <= one[0]
        is_below = one[3] <= other[1] or other[3] <= one[1]
        assert is_beside or is_below, f"'{one[4]}' and '{other[4]}' overlap"


def stairs(*shares: float) -> tuple[CurvePoint, ...]:
    """Points a MiB apart from 10 MiB on."""
    return tuple(CurvePoint((10 + index) * MIB, share) for index, share in enumerate(shares))


STEEP = stairs(6.0, 0.2, 0.1, 0.05, 0.02, 0.0)
CURVES = {
    "in the middle": (Curve(STEEP, STEEP[2]), STEEP[2].peak_bytes + 10),
    "at the smallest": (Curve(STEEP, STEEP[0]), STEEP[0].peak_bytes),
    "next to the smallest": (Curve(stairs(0.6, 0.59, 0.0), CurvePoint(11 * MIB, 0.59)), 11 * MIB + 5),
    "at no limit": (Curve(STEEP, STEEP[-1]), None),
    "next to no limit": (Curve(STEEP, STEEP[-2]), STEEP[-2].peak_bytes),
    "far below the budget": (Curve(STEEP, STEEP[-1]), 10**12),
    "a little below the budget": (Curve(STEEP, STEEP[-1]), round(15.4 * MIB)),
    "off the curve": (Curve(STEEP, CurvePoint(12 * MIB, 1.0)), 12 * MIB),
    "all there is": (Curve((CurvePoint(MIB, 0.0),), CurvePoint(MIB, 0.0)), MIB),
    "nearly equal": (Curve((CurvePoint(MIB, 1e-5), CurvePoint(MIB + 1, 0.0)), CurvePoint(MIB + 1, 0.0)), MIB + 1),
}


@pytest.mark.parametrize(("curve", "budget_bytes"), CURVES.values(), ids=CURVES)
def test_curves_can_be_read_wherever_the_plan_is(curve: Curve, budget_bytes: int | None) -> None:
    scene = curve_picture(curve, budget_bytes)
    assert_readable(scene)
    assert_readable(framed(scene))
    dots = [shape for shape in scene.shapes if isinstance(shape, Dot)]
    assert [dot.look for dot in dots] == ["point"] * len(curve.points) + ["chosen"]
    names = [text.text for text in texts(scene) if text.look == "mark"]
    assert f"chosen: {format_bytes(curve.chosen.peak_bytes)}, {curve.chosen.repeated_share:.1%}" in names
    assert any("repeated" in text.text and "forward" in text.text for text in texts(scene))
    assert ("better plan" in scene.description) == (curve.chosen not in curve.points)


measured = st.lists(
    st.builds(CurvePoint, st.integers(1, 2**44), st.floats(0, 8, allow_subnormal=False)), min_size=1, max_size=12
)


@settings(max_examples=100, deadline=None)
@given(measured, st.data())
def test_any_curve_can_be_read(listed: list[CurvePoint], data: st.DataObject) -> None:
    points = best_points(listed)
    chosen = data.draw(st.sampled_from(points))
    budget_bytes = data.draw(st.none() | st.integers(chosen.peak_bytes, 2 * chosen.peak_bytes))
    assert_readable(framed(curve_picture(Curve(points, chosen), budget_bytes)))


def test_the_line_is_a_staircase_through_all_points_and_falls() -> None:
    curve, budget_bytes = CURVES["in the middle"]
    scene = curve_picture(curve, budget_bytes)
    line = outline(scene, "after")
    places = {(dot.x, dot.y) for dot in scene.shapes if isinstance(dot, Dot)}
    assert places <= set(line.points)
    assert len(line.points) == 2 * len(curve.points) - 1
    for (x0, y0), (x1, y1) in itertools.pairwise(line.points):
        assert (x0 < x1) != (y0 < y1)  # to the right or down, never both
    limit = outline(scene, "limit")
    [chosen] = [dot for dot in scene.shapes if isinstance(dot, Dot) and dot.look == "chosen"]
    assert [x for x, _ in limit.points] == pytest.approx([chosen.x] * 2, abs=1)


def test_memory_over_time_has_both_lines_and_the_budget() -> None:
    study = study_of({"a": 1}, {"b": 0.5}, budget_bytes=5 * MIB)
    scene = timeline_picture(study)
    assert_readable(scene)
    before, after, limit = (outline(scene, look).points for look in ("before", "after", "limit"))
    heights = [y for _, y in before[::2]]
    assert len(heights) == len(study.before.live_bytes)
    assert heights[0] == heights[3] > heights[1] > heights[2]
    assert min(y for _, y in before) < limit[0][1] == limit[1][1] < min(y for _, y in after)
    assert after[-1][0] > before[-1][0]  # five ops against four
    words = [text.text for text in texts(scene)]
    assert {"peak 6.0 MiB", "peak 4.0 MiB", "budget 5.0 MiB", "forward", "backward"} <= set(words)
    assert "budget" not in [text.text for text in texts(timeline_picture(replace(study, budget_bytes=None)))]


def test_long_steps_keep_their_peaks_with_fewer_points() -> None:
    live = [MIB + (index % 7) * 1000 for index in range(20_000)]
    live[12_345] = 9 * MIB
    study = replace(study_of({}, {}), before=profile(*live), after=profile(*live))
    scene = timeline_picture(study)
    line = outline(scene, "before")
    assert len(line.points) < 2000
    [dot] = [shape for shape in scene.shapes if isinstance(shape, Dot) and shape.look == "before-point"]
    assert min(y for _, y in line.points) == pytest.approx(dot.y)
    assert_readable(scene)


def layers(num_layers: int, *parts: str) -> list[str]:
    return ["embed", *(f"blocks.{index}.{part}" for index in range(num_layers) for part in parts), ""]


@pytest.mark.parametrize(
    ("modules", "expected", "how"),
    [
        (layers(2, "a", "b"), ["embed", "blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b", OUTSIDE_MODULES], ""),
        (
            layers(12, "a", "b", "c"),
            ["embed", *(f"blocks.{index}" for index in range(12)), OUTSIDE_MODULES],
            "each with all that is inside it",
        ),
        (layers(90, "a", "b"), ["embed", "blocks.*.a", "blocks.*.b", OUTSIDE_MODULES], "* is any layer number"),
    ],
)
def test_modules_are_grouped_so_that_they_can_be_read(modules: list[str], expected: list[str], how: str) -> None:
    study = study_of(dict.fromkeys(modules, 10), dict.fromkeys(modules, 0.25))
    rows, told = module_rows(study)
    assert [row.name for row in rows] == expected
    assert told == how
    assert sum(row.kept_bytes for row in rows) == 10 * len(modules)
    assert sum(row.repeated_share for row in rows) == 0.25 * len(modules)
    assert_readable(module_picture(study))


def test_too_many_modules_show_the_largest() -> None:
    modules = [f"part_{'x' * index}" for index in range(60)]
    study = study_of({module: index for index, module in enumerate(modules)}, {modules[0]: 0.5})
    rows, _ = module_rows(study)
    assert len(rows) == 24
    assert rows[0].name == modules[0]
    assert rows[-1].name == "37 others"
    assert sum(row.kept_bytes for row in rows) == sum(range(60))
    assert_readable(module_picture(study))
    assert_readable(module_picture(study_of({}, {})))


def test_a_real_plan_in_pictures(step: Any) -> None:
    scenes = plan_pictures(step.memory_study)
    assert list(scenes) == ["pareto", "memory", "modules"]
    for scene in scenes.values():
        assert_readable(scene)
    rows, _ = module_rows(step.memory_study)
    assert sum(row.kept_bytes for row in rows) == sum(value.num_bytes for value in step.plan.memory.kept)
    assert sum(row.repeated_share for row in rows) == pytest.approx(step.plan.memory.repeated_share)
    shown = [row.name for row in rows if row.name != OUTSIDE_MODULES]
    assert shown == [name for index in range(6) for name in (f"{index}.inner", str(index)) if name in shown]


def test_the_page_has_the_pictures_and_the_text_does_not(step: Any) -> None:
    page = step_report(step).to_html()
    section = page.split('id="memory-budget"', 1)[1].split("</section>", 1)[0]
    assert section.count("<svg ") == 3
    assert section.index("What memory costs") < section.index("Memory over time") < section.index("by module")
    for name in {*re.findall(r'class="([\w-]+)" (?:x|d|cx)=', section)}:
        assert f"svg .{name} {{" in page
    assert "come on top" not in section
    assert "What memory costs" not in step.explain()


def test_what_comes_on_top_of_the_plan_is_said() -> None:
    study = study_of({"a": 1}, {"b": 0.5})
    step: Any = SimpleNamespace(
        plan=SimpleNamespace(memory=replace(study.plan, peak_bytes=7 * MIB)), memory_study=study
    )
    [section] = memory_sections(step, pictures=True)
    assert any("come on top of what is drawn: 3.0 MiB" in str(block) for block in section.blocks)


def test_files_stand_alone_and_are_the_same_each_time(step: Any, tmp_path: Path) -> None:
    paths = step.memory_pictures(tmp_path / "deep" / "folder")
    assert [path.name for path in paths] == ["pareto.svg", "memory.svg", "modules.svg"]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
        light, dark = text.split("@media (prefers-color-scheme: dark)")
        assert LIGHT["ink"] in light
        assert DARK["ink"] not in light
        assert DARK["ink"] in dark
        used = {element.get("class") for element in root.iter() if element.get("class")}
        assert all(f".{name} {{" in text for name in used)
    again = step.memory_pictures(tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_bitmaps_have_the_same_proportions(step: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scenes = plan_pictures(step.memory_study)
    for path in step.memory_pictures(tmp_path, format="png"):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        scene = framed(scenes[path.stem])
        assert struct.unpack(">II", data[16:24]) == (2 * scene.width, pytest.approx(2 * scene.height, abs=1))


def test_bitmaps_without_matplotlib_are_refused(step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WholestepError, match=r"PNG pictures need matplotlib: .* 'wholestep\[plot\]'"):
        step.memory_pictures(tmp_path, format="png")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_drawn_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(WholestepError, match="pictures are written as svg or png, not as 'gif'"):
        step.memory_pictures(tmp_path, format="gif")
    with pytest.raises(WholestepError, match=r"no memory plan to draw: compile the step with a memory_budget"):
        compiled().memory_pictures(tmp_path)
    with pytest.raises(wholestep.GuardError, match="has not been called"):
        wholestep.compile(train_step, memory_budget=0.5).memory_pictures(tmp_path)


def test_a_curve_of_its_own_says_whose_prediction_it_is(tmp_path: Path) -> None:
    path = save_curve(CURVES["in the middle"][0], tmp_path / "joint.svg")
    assert "predicted from the planner&#39;s simulation" in path.read_text(encoding="utf-8")


def failure(num_values: int) -> NoCutError:
    way = tuple(
        WayStop(f"v{index}", 2**20, f"op{index}", "blocks.<b>", "it is to be dropped", "so it is" if is_last else "")
        for index, is_last in ((index, index == num_values - 1) for index in range(num_values))
    )
    return NoCutError("late", way)


@pytest.mark.parametrize(("num_values", "num_shown"), [(1, 1), (3, 3), (9, 9), (30, 8)])
def test_a_failing_cut_shows_its_way(num_values: int, num_shown: int) -> None:
    scene = cut_picture(failure(num_values))
    assert_readable(framed(scene))
    words = [text.text for text in texts(scene)]
    assert words[0] == "late runs after the forward and needs"
    assert words.count("may not be kept: it is to be dropped") == num_shown
    assert words.count("1.0 MiB") == num_shown
    assert words[-1] == f"op{num_values - 1} may not run again: so it is"
    boxes = [shape.look for shape in scene.shapes if shape.look in ("box", "bad-box")]
    assert boxes == ["box"] * num_shown + ["bad-box"]
    assert any(f"{num_values - num_shown} more values" in word for word in words) == (num_values > num_shown)


def test_a_failing_cut_as_files_and_as_a_page(tmp_path: Path) -> None:
    error = failure(3)
    ElementTree.fromstring(save_failing_cut(error, tmp_path / "cut.svg").read_text(encoding="utf-8"))
    page = save_failing_cut(error, tmp_path / "cut.html").read_text(encoding="utf-8")
    assert "<svg " in page
    assert "<b>" not in page
    assert cut_report(error).to_text().count("it is to be dropped") == 3
    with pytest.raises(WholestepError, match="not as 'pdf'"):
        save_failing_cut(error, tmp_path / "cut.pdf")


def test_looks_are_of_the_palette_and_text_is_escaped() -> None:
    assert set(LIGHT) == set(DARK)
    assert {colour for look in LOOKS.values() for colour in (look.fill, look.stroke) if colour} <= set(LIGHT)
    nasty = "<b>&\"'</b>"
    scene = Scene(nasty, nasty, 100, 100, (Text(0, 12, nasty), Dot(1, 1, 1, "point", nasty)))
    for text in (file_svg(scene), str(page_svg(scene))):
        root = ElementTree.fromstring(text)
        found = [element.text for element in root.iter() if element.tag.endswith(("text", "title"))]
        assert found.count(nasty) >= 3
        assert root.get("aria-label") == f"{nasty}. {nasty}"


def test_ticks_are_round_and_have_units() -> None:
    assert byte_ticks(7.4 * MIB, 10.2 * MIB) == [
        (value * MIB, f"{value} MiB") for value in (7.5, 8.0, 8.5, 9.0, 9.5, 10.0)
    ]
    assert byte_ticks(0, 900)[:3] == [(0, "0 B"), (200, "200 B"), (400, "400 B")]
    assert [text for _, text in share_ticks(0, 0.55)] == ["0 %", "10 %", "20 %", "30 %", "40 %", "50 %"]
    assert [text for _, text in count_ticks(3)] == ["0", "1", "2", "3"]


def test_the_pictures_of_the_documentation_can_be_drawn_again(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "docs/images"
    spec = importlib.util.spec_from_file_location("make_memory_svg", folder / "make_memory_svg.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.CONFIG = replace(script.CONFIG, layers=1, width=16, context=16)  # as quick as can be
    assert script.main([str(tmp_path)]) == 0
    for path in tmp_path.iterdir():
        drawn, known = (ElementTree.parse(place).getroot() for place in (path, folder / path.name))
        assert [element.text for element in drawn.iter() if element.get("class") == "title"] == [
            element.text for element in known.iter() if element.get("class") == "title"
        ]
    assert {path.name for path in tmp_path.iterdir()} == {"memory_pareto.svg", "memory_over_time.svg"}
