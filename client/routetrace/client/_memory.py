"""Memory for rows: numpy's, or torch's page-locked memory; copies to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from routetrace.common import checks as check
from routetrace.common.errors import InvalidArgument, MissingDependency, quoted, typed

if TYPE_CHECKING:
    import torch


_T = TypeVar("_T")


def read_only(view: npt.NDArray[_T]) -> npt.NDArray[_T]:  # type: ignore[type-var]
    """Return a view that refuses writes."""
    view.flags.writeable = False
    return view


def require_torch(field: str) -> None:
    """Raise MissingDependency, naming the field or method, unless torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"{field} needs torch, which cannot be imported ({error}); pip install torch",
            package="torch",
            install="pip install torch",
            field=field,
        ) from error


def check_pin(pin_memory: bool) -> bool:
    """Return whether to use page-locked memory.

    Raises:
        InvalidArgument: if it is not a bool.
        MissingDependency: if there is no such memory.
    """
    pin = check.flag("pin_memory", pin_memory)
    if pin:
        require_torch("pin_memory")
        import torch

        if not torch.cuda.is_available():
            raise no_cuda("pin_memory")
    return pin


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, pin: bool) -> npt.NDArray[Any]:
    """Return an array of undefined content, page-locked if `pin`.

    Page-locked memory belongs to torch, which caches it: only the first allocation is slow.
    """
    dtype = np.dtype(dtype)
    if not pin:
        return np.empty(shape, dtype)
    import torch

    # torch before 2.3 has no uint16, and numpy no pinned memory.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, pin: bool) -> npt.NDArray[Any]:
    """Return an array of zeros, page-locked if `pin`."""
    if not pin:
        return np.zeros(shape, dtype)
    array = empty(shape, dtype, pin)
    array.fill(0)
    return array


def check_device(device: Any) -> None:
    """Raise an error unless torch has the device on this machine.

    Raises:
        InvalidArgument: if it is no device.
        MissingDependency: if it is one of CUDA, and there is none.
    """
    import torch

    if device is None:
        return
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        shown = quoted(device) if isinstance(device, str) else typed(device)
        raise InvalidArgument(field="device", value=shown, expected="a torch device") from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise no_cuda(f"device {str(device)!r}")
    try:
        torch.empty(0, device=parsed)
    except (AssertionError, ImportError, RuntimeError, NotImplementedError) as error:
        raise InvalidArgument(
            field="device",
            value=quoted(str(device)),
            expected=f"a torch device of this machine ({error})",
        ) from error


def no_cuda(field: str) -> MissingDependency:
    """Return the error for a machine without CUDA."""
    return MissingDependency(
        f"{field} needs CUDA, which torch does not have here; "
        "use a machine with a GPU and torch built for CUDA",
        package="torch with CUDA",
        install="use a machine with a GPU and torch built for CUDA",
        field=field.partition(" ")[0],
    )


def to_numpy(values: Any) -> npt.NDArray[Any]:
    """Convert an array, or a tensor on any device, to numpy."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def to_tensor(array: npt.NDArray[Any], device: Any = None) -> torch.Tensor:
    """Return a bool or integer array as a tensor: of the same memory, or on a device.

    The copy to a device is ordered on its current stream. It does not block if the memory is
    page-locked; if that is torch's, it may be freed at once and is not reused before the copy ends.
    uint16 becomes int16 of the same bits, which torch before 2.3 has.
    """
    import torch

    # torch warns of memory that it must not write to, as some object stores hand out.
    array = array if array.flags.writeable else array.copy()
    array = array.view(np.int16) if array.dtype == np.uint16 else array
    tensor = torch.from_numpy(array)
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, torch.Tensor):
        # On the very storage: torch's allocator would not know of copies from the middle of it.
        storage = owner.untyped_storage()
        first = (tensor.data_ptr() - storage.data_ptr()) // array.itemsize
        tensor = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storage, first, tensor.shape, tensor.stride()
        )
    if device is None:
        return tensor
    if tensor.is_contiguous() or not tensor.is_pinned():
        return tensor.to(device, non_blocking=True)
    # Some tokens of all layers; as a whole, torch would gather them in pageable memory first.
    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    for to, of in zip(moved, tensor, strict=True):
        to.copy_(of, non_blocking=True)
    return moved
