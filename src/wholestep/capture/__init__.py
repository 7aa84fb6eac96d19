"""Capture: an ordinary train step becomes one functional graph."""

from wholestep.capture.capture import Capture, capture
from wholestep.capture.leftovers import garbage_collection_paused

__all__ = ["Capture", "capture", "garbage_collection_paused"]
