"""Stand-ins for what SGLang's wheel for CUDA imports and a CPU lacks.

With this directory on PYTHONPATH it also holds for the processes that SGLang spawns.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Name(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Stub(types.ModuleType):
    """A module with every name; none of them works but those of `sglang_cpu_kernels`."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ in ("sgl_kernel", "sgl_kernel.speculative"):
            import sglang_cpu_kernels

            if (kernel := getattr(sglang_cpu_kernels, name, None)) is not None:
                return kernel
        return _Name(name, (), {"__init__": lambda self, *_, **__: None})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package of SGLang's kernels for CUDA."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Operators(importlib.abc.MetaPathFinder):
    """Defines operators before torchvision is imported: its wheel's library needs CUDA."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torchvision":
            import torch

            for operator in ("nms", "qnms"):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                try:
                    torch.library.define(f"torchvision::{operator}", signature)
                except RuntimeError:  # defined
                    break


sys.meta_path.insert(0, _Operators())
sys.meta_path.append(_Stubs())
