"""Capture routing of Transformers models: generate() and continuous batching."""

from routetrace.capture_agent.engines.transformers.capture import TransformersCapture
from routetrace.capture_agent.engines.transformers.inputs import model_of

__all__ = ["TransformersCapture", "model_of"]
