"""Serve the experts of Transformers models from host memory."""

from routetrace.experts.transformers.serving import ServedExperts, serve_experts

__all__ = ["ServedExperts", "serve_experts"]
