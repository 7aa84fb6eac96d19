"""Imported before anything imports torchvision: lets it be imported where its operators cannot be loaded.

Timm, torchmetrics (and with it Lightning) and transformers import torchvision. Constraints name its version but not
its build. One for CUDA beside a torch for the CPU does not load its library, and then describes operators that do not
exist, which is an error. No test uses these operators: declared, without a kernel, they are enough for the import.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Those that torchvision describes whether its library is loaded or not."""

library = torch.library.Library("torchvision", "FRAGMENT")


def declare_missing() -> None:
    """Declare operators of torchvision if it cannot be imported for want of them."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torchvision")
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)


declare_missing()
