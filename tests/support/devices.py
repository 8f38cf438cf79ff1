"""Parameters of tests that run on a CUDA device where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def on_cuda(value: str) -> Any:
    """Return a parameter for a test that needs a CUDA device."""
    without = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.param(value, marks=[pytest.mark.cuda, without])


DEVICES = ["cpu", on_cuda("cuda")]
