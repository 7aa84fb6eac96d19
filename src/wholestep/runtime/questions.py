"""The guard of a step that looks at values of its batch: they are looked at again before each call."""

from __future__ import annotations

from wholestep import _sizes_torch
from wholestep.capture import Capture
from wholestep.errors import CaptureError
from wholestep.runtime.executable import Executable
from wholestep.runtime.guards import Call, Check


def question_guards(capture: Capture) -> list[Check]:
    """Nothing for a step that asks nothing; it comes last, as it takes the types of the arguments for granted."""
    for assumption in _sizes_torch.unasked(capture.graph.fake_mode.shape_env):
        raise CaptureError(
            f"a rewrite of the graph takes for granted that {assumption}, of a size that depends on values",
            location=capture.sizes_of_values,
            advice="Leave out the pass",
        )
    if capture.asked is None:
        return []
    answers, places, last = capture.asked.answers, capture.asked.places, capture.asked.found
    expected = tuple([answer.value for answer in answers])
    are_open = any(answer.is_open for answer in answers)
    graph = Executable(capture.asked.graph, capture.bindings, "questions")

    def check(now: Call) -> str | None:
        try:
            found, _ = graph.run(now.leaves)
        except (RuntimeError, IndexError) as error:  # after another answer, later questions may make no sense
            return f"a value that the step looks at cannot be computed any more ({str(error).splitlines()[0]})"
        for place, value in zip(places, found, strict=True):
            last[place] = value
        if found == expected and not are_open:
            return None
        # NaN is not equal to itself, and takes the same branches.
        pairs = [(old, new) for old, new in zip(answers, found, strict=True) if not old.is_open]
        differing = [
            (old, new) for old, new in pairs if old.value != new and not (old.value != old.value and new != new)
        ]
        if not differing:
            return None
        answer, value = differing[0]
        if isinstance(value, str):
            return f"a size that values of the batch decide at {answer.where} is {value or 'another one'}"
        return f"the step looks at a value of its batch at {answer.where}, which was {answer.value} and is {value}"

    return [check]
