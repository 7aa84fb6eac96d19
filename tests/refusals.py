"""What every refusal has to say: the user's line, one sentence about it, and what to do."""

import os
import re

import torch

import wholestep

_OURS = os.path.dirname(os.path.realpath(wholestep.__file__)) + os.sep
_OPEN = tuple(os.path.join(_OURS, name) + os.sep for name in ("zoo", "integrations"))
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_PLACE = re.compile(r"^(?P<file>.+):(?P<line>\d+)$", re.DOTALL)
_OF_MACHINERY = re.compile(r"\b(zuf|zf|zu|u|s)\d+\b|functional_mode|FunctionalTensor|FakeTensor|ProxyTensor|SymNode")


def faults_of(error: wholestep.CaptureError) -> list[str]:
    """What is wrong with the text of a refusal; nothing, one hopes."""
    faults: list[str] = []
    place = _PLACE.match(error.location or "")
    if place is None:
        faults.append(f"no line: {error.location}")
    else:
        path = os.path.realpath(place["file"])
        if path.startswith((_OURS, _TORCH)) and not path.startswith(_OPEN):
            faults.append(f"the line is none of the user's: {error.location}")
    if not str(error).startswith(f"{error.location}: "):
        faults.append("the line does not come first")
    if re.search(r"\.\s+[A-Z]|\n|\.$", error.message):
        faults.append(f"not one sentence: {error.message!r}")
    if _OF_MACHINERY.search(error.message):
        faults.append(f"words of what traces: {error.message!r}")
    if not error.advice:
        faults.append(f"no advice: {error.message!r}")
    return faults
