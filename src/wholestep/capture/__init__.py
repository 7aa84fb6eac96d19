"""Capture: an ordinary train step becomes one functional graph."""

from wholestep.capture.capture import Capture, capture

__all__ = ["Capture", "capture"]
