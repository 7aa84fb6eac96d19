"""Pipelines at run time: stages on real tensors, values between ranks, failures that everyone hears of."""

from wholestep.runtime.pipeline.pipe import Pipe, PipeOptions, PipeResult

__all__ = ["Pipe", "PipeOptions", "PipeResult"]
