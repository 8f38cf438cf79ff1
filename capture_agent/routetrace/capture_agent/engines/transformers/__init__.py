"""Capture routing of Transformers models: generate() and continuous batching."""

from routetrace.capture_agent.engines.transformers.capture import TransformersCapture

__all__ = ["TransformersCapture"]
