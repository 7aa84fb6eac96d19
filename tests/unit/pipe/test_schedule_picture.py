"""Pictures of timelines: what is drawn, that it can be read, and its plain-text form."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from expecttest import assert_expected_inline

from wholestep.pipe import Action, StageCosts, Timeline, build_schedule, simulate
from wholestep.report.scene import LOOKS, Box, Scene, Text, framed, text_width
from wholestep.report.schedule_picture import schedule_picture, schedule_scene, schedule_text

COSTS = StageCosts(1, 1.3, 0.7)


def timeline_of(name: str, num_ranks: int = 3, num_micro_batches: int = 5) -> Timeline:
    return simulate(build_schedule(name, num_ranks, num_micro_batches), COSTS)


def measured_like(timeline: Timeline) -> Timeline:
    rows = [[(span.action, 90 + 7 * span.start, 90 + 7 * span.end) for span in row] for row in timeline.spans]
    return Timeline.measured(timeline.name, rows, unit="ms")


def assert_readable(scene: Scene) -> None:
    """No text leaves the picture or covers another, and every look exists."""
    assert {shape.look for shape in scene.shapes} <= set(LOOKS)
    boxes: list[tuple[float, float, float, float]] = []
    for text in (shape for shape in scene.shapes if isinstance(shape, Text)):
        width = text_width(text.text) * LOOKS[text.look].font_size / 12
        left = text.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor] * width
        assert left >= 0
        assert left + width <= scene.width
        assert scene.top <= text.y - 9
        assert text.y <= scene.top + scene.height
        boxes.append((left, text.y - 9, left + width, text.y))
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "v-half", "dualpipe-v", "forward"])
def test_every_action_is_a_box_where_and_as_long_as_it_runs(name: str) -> None:
    timeline = timeline_of(name)
    scene = schedule_scene(timeline)
    assert_readable(framed(scene))
    boxes = {
        shape.title.split(":")[0]: shape for shape in scene.shapes if isinstance(shape, Box) and "stage" in shape.title
    }
    spans = [span for row in timeline.spans for span in row]
    assert set(boxes) == {str(span.action) for span in spans}
    first = boxes["0F0"]
    for span in spans:
        box = boxes[str(span.action)]
        assert (box.x - first.x) / (first.width + 0.8) == pytest.approx(span.start, abs=0.01)
        assert (box.width + 0.8) / (first.width + 0.8) == pytest.approx(span.end - span.start, abs=0.01)


def test_kinds_have_colours_of_their_own_and_a_legend() -> None:
    scene = schedule_scene(timeline_of("dualpipe-v", 3, 8))
    looks = {
        str(shape.title).split(" ")[0][1]: shape.look
        for shape in scene.shapes
        if isinstance(shape, Box) and "stage" in shape.title
    }
    assert set(looks) == set("FBIW")
    assert len(set(looks.values())) == 4
    texts = [shape.text for shape in scene.shapes if isinstance(shape, Text)]
    assert {"forward", "backward, whole", "gradients of inputs", "gradients of weights", "idle"} <= set(texts)


def test_planned_and_measured_are_shown_together() -> None:
    planned = timeline_of("zb-h1")
    scene = schedule_scene(planned, measured_like(planned))
    assert_readable(framed(scene))
    assert scene.description.startswith("planned: 3 ranks, ")
    assert f"measured: 3 ranks, {7 * planned.makespan:.4g} ms" in scene.description
    texts = [shape.text for shape in scene.shapes if isinstance(shape, Text)]
    assert {"planned", "measured", "time, slots", "time, ms"} <= set(texts)


def test_timelines_of_one_unit_share_their_scale() -> None:
    fast, slow = (simulate(build_schedule("1f1b", 2, 2), StageCosts(cost, cost, cost)) for cost in (1, 2))
    shapes = [
        shape for shape in schedule_scene(fast, slow).shapes if isinstance(shape, Box) and shape.title.startswith("0F0")
    ]
    assert shapes[1].width + 0.8 == pytest.approx(2 * (shapes[0].width + 0.8))


def test_the_picture_is_one_svg_for_light_and_dark() -> None:
    text = schedule_picture(timeline_of("zbv"))
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    assert schedule_picture(timeline_of("zbv")) == text


def test_a_large_schedule_is_still_a_picture() -> None:
    scene = schedule_scene(simulate(build_schedule("1f1b", 16, 100), COSTS))
    assert_readable(Scene(scene.title, "", scene.width, scene.height, scene.shapes))
    assert len(scene.shapes) < 2 * 16 * 100 + 500


def test_nothing_measured_is_an_empty_picture() -> None:
    empty = Timeline.measured("nothing", [[], []])
    assert "0 us, 0.0% idle" in schedule_scene(empty).description
    assert schedule_text(empty).count("\n") == 3


def test_the_text_shows_who_does_what_when() -> None:
    assert_expected_inline(
        schedule_text(simulate(build_schedule("1f1b", 2, 3), StageCosts())),
        """\
1f1b: 2 ranks, 12 slots, 25.0% idle, at most 2 held by a rank
rank 0 |F0 F1 ......B0    F2 B1    ...B2    |  25.0% idle
rank 1 |...F0 B0    F1 B1    F2 B2    ......|  25.0% idle
""",
    )


def test_text_that_is_too_narrow_keeps_its_width() -> None:
    lines = schedule_text(timeline_of("zbv", 4, 16), max_columns=40).splitlines()
    assert [len(line.split("|")[1]) for line in lines[1:]] == [40] * 4
    assert "F" in lines[1]


def test_a_long_action_says_which_micro_batch() -> None:
    timeline = Timeline.measured(
        "one", [[(Action.from_text("0F12"), 0.0, 8.0), (Action.from_text("0B12"), 10.0, 12.0)]]
    )
    assert schedule_text(timeline).splitlines()[1].startswith("rank 0 |F12             ....B12 |")
