"""Adapters for trainers: replay, Megatron, dialects, agreement, diagnosis."""
