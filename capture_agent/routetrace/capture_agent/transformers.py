"""Capture of Transformers models; short name of `routetrace.capture_agent.engines.transformers`."""

from routetrace.capture_agent.engines.transformers import TransformersCapture

__all__ = ["TransformersCapture"]
