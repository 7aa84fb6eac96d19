"""Stages in files: a graph as JSON and weights as safetensors, loaded without the model's code and without any code."""

from wholestep.pipe.files.stage import load_stage, save_stage
from wholestep.pipe.files.stage_json import weight_names

__all__ = ["load_stage", "save_stage", "weight_names"]
