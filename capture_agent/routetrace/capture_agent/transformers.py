"""Capture of Transformers models; short name of `routetrace.capture_agent.engines.transformers`."""

from routetrace.capture_agent.engines.transformers import TransformersCapture, model_of

__all__ = ["TransformersCapture", "model_of"]
