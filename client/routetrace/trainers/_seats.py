"""Functions of a model that `replay` stands in for, and the checkpoints that run them again.

A stand-in is one function for all modules, bound to each, and stays out of compiled graphs: a
compiled model has one more program for all blocks and layers, and its own one between blocks.

A checkpoint that is called while a block is open gets a `Region` in place of its function. It keeps
the choices that its routers made at first, and takes them again whenever it is run again. It lives
as long as the graph of the backward pass, so that no block has to be open then.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from routetrace.common.errors import InvalidArgument
from routetrace.trainers._force import Forcer

Kind = Literal["router", "checkpoint", "pass"]

_REASON = (
    "routetrace keeps routers out of graphs while replay lasts; compile without fullgraph=True"
)


class Place(NamedTuple):
    """A function of a module."""

    module: nn.Module
    name: str
    kind: Kind


class Choice(NamedTuple):
    """Experts that a router used."""

    place: Place
    ids: torch.Tensor
    """[tokens, top_k] of uint8, or of int16 with the bits of uint16."""
    again: Callable[[torch.Tensor, Callable[..., Any], Any, Any], Any]
    """Calls a function with arguments and keyword arguments, and makes it choose ids."""


class Watcher(Protocol):
    """What a block does where a pass of the model or of its decoder runs."""

    def begin(self, module: nn.Module) -> None:
        """Note that it begins; raises nothing."""
        ...

    def check(self, args: Any, kwargs: Any) -> None:
        """Check its inputs."""
        ...

    def end(self, module: nn.Module, *, failed: bool) -> None:
        """Check what ran, unless it failed."""
        ...


class _Seat:
    """A function that has a stand-in, and those who want it: `None` for a region."""

    def __init__(self, place: Place) -> None:
        # An attribute of the module itself hides the method of its class.
        self.before = vars(place.module).get(place.name)
        if getattr(self.before, "__func__", None) is _stand_in(place.kind, place.name):
            raise _copied(place.module)
        self.original = getattr(place.module, place.name)
        self.users: list[Any] = []


_SEATS: dict[Place, _Seat] = {}


def take(place: Place, user: Forcer | Watcher | None = None) -> None:
    """Stand in for a function, for one more user; the latest one counts."""
    seat = _SEATS.get(place)
    if seat is None:
        seat = _Seat(place)
        stand_in = MethodType(_stand_in(place.kind, place.name), place.module)
        vars(place.module)[place.name] = stand_in
        _SEATS[place] = seat
    seat.users.append(user)


def leave(place: Place, user: Forcer | Watcher | None = None) -> None:
    """End `take`; the last one puts the function back."""
    seat = _SEATS[place]
    seat.users.remove(user)
    if seat.users:
        return
    del _SEATS[place]
    current = vars(place.module).get(place.name)
    if getattr(current, "__func__", None) is not _stand_in(place.kind, place.name):
        return  # replaced within the block
    if seat.before is None:
        del vars(place.module)[place.name]
    else:
        vars(place.module)[place.name] = seat.before


def checkpoints_of(model: nn.Module) -> list[Place]:
    """Return the checkpoint functions of a model: of transformers, and of torch's wrapper."""
    return [
        Place(module, name, "checkpoint")
        for module in model.modules()
        for name in ("_gradient_checkpointing_func", "checkpoint_fn")
        if callable(vars(module).get(name))
    ]


class Region:
    """Function of a checkpoint whose routers choose the same whenever it is run again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.choices: list[Choice] = []
        self.places: set[Place] = set()
        """What needs a stand-in when it is run again."""
        self._function = function
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        run = _Run(self, self._has_run)
        places = list(self.places) if run.is_repeated else []
        self._has_run = True
        for place in places:
            take(place)
        _runs().append(run)
        try:
            return self._function(*args, **kwargs)
        finally:
            _runs().pop()
            for place in places:
                leave(place)


class _Run:
    """One run of a region."""

    def __init__(self, region: Region, is_repeated: bool) -> None:
        self.region = region
        self.is_repeated = is_repeated
        self.pack = _pack_of_checkpoint()
        self._at = 0

    def next(self, place: Place) -> Choice:
        """Return the choice that a router made when it ran at first."""
        choices = self.region.choices
        if self._at >= len(choices) or choices[self._at].place != place:
            raise InvalidArgument(
                field="model",
                value=f"a {type(place.module).__name__} that runs in recomputation alone",
                expected="the routers of the forward pass, in their order",
                remedy="checkpoint parts of the model that run the same layers each time",
            )
        self._at += 1
        return choices[self._at - 1]


_LOCAL = threading.local()


def _runs() -> list[_Run]:
    """Regions that run in this thread, the innermost last; autograd has threads of its own."""
    if not hasattr(_LOCAL, "runs"):
        _LOCAL.runs = []
    runs: list[_Run] = _LOCAL.runs
    return runs


def is_repeated() -> bool:
    """Return whether this is a recomputation that takes the choices of its forward pass."""
    return any(run.is_repeated for run in _runs())


def _pack_of_checkpoint() -> Any:
    """Return the innermost hook of saved tensors, if it is one of torch's checkpoints."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks and hooks[0].__module__ == "torch.utils.checkpoint" else None


def _is_unbound() -> bool:
    """Return whether a checkpoint that has no region would run this again, or does."""
    runs = _runs()
    if not runs and torch._C._current_graph_task_id() != -1:
        return True
    pack = _pack_of_checkpoint()
    if pack is not None and not (runs and pack is runs[-1].pack):
        return True
    if torch.is_grad_enabled():
        return False
    # Reentrant checkpoints, those of other libraries too, run layers in `forward` of a function of
    # autograd.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Region.__call__.__code__:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            return True
        frame = frame.f_back
    return False


def _unbound(module: nn.Module) -> InvalidArgument:
    return InvalidArgument(
        field="model",
        value=f"a {type(module).__name__} in a checkpoint that is called otherwise",
        expected="checkpoints that keep the choices of their forward pass",
        remedy="call model.gradient_checkpointing_enable(), or wrap layers in torch's "
        "checkpoint_wrapper, before the block",
    )


def _seat_of(place: Place) -> _Seat:
    seat = _SEATS.get(place)
    if seat is None:
        raise _copied(place.module)
    return seat


def _copied(module: nn.Module) -> InvalidArgument:
    return InvalidArgument(
        field="model",
        value=f"a copy of a {type(module).__name__} that was made within a block of replay",
        expected="a copy that was made outside of it",
    )


def _choose(place: Place, args: Any, kwargs: Any) -> Any:
    seat, runs = _seat_of(place), _runs()
    forcers: list[Forcer] = [user for user in seat.users if user is not None]
    repeated = max((i for i, run in enumerate(runs) if run.is_repeated), default=-1)
    if repeated >= 0:
        choice = runs[repeated].next(place)
        output = choice.again(choice.ids, seat.original, args, kwargs)
    elif not forcers:  # of a region that runs in another thread
        return seat.original(*args, **kwargs)
    else:
        is_unbound = _is_unbound()
        if is_unbound and not all(forcer.is_inert for forcer in forcers):
            raise _unbound(place.module)
        if is_unbound and torch._C._current_graph_task_id() != -1:
            return seat.original(*args, **kwargs)
        output, ids, again = forcers[-1].choose(seat.original, args, kwargs, is_kept=bool(runs))
        for forcer in forcers:
            forcer.runs += 1
        choice = Choice(place, ids, again)
    for run in runs[repeated + 1 :]:
        run.region.choices.append(choice)
        run.region.places.add(place)
    return output


def _checkpoint(place: Place, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    seat, runs = _seat_of(place), _runs()
    if not is_repeated() and _is_unbound():
        raise _unbound(place.module)
    for run in runs:
        run.region.places.add(place)
    return seat.original(Region(function), *args, **kwargs)


def _enter(module: nn.Module, name: str, args: Any, kwargs: Any) -> Callable[..., Any]:
    seat = _seat_of(Place(module, name, "pass"))
    for user in seat.users:
        user.begin(module)
    try:
        for user in seat.users:
            user.check(args, kwargs)
    except BaseException:
        _exit(module, name, failed=True)
        raise
    original: Callable[..., Any] = seat.original
    return original


def _exit(module: nn.Module, name: str, *, failed: bool) -> None:
    for user in _seat_of(Place(module, name, "pass")).users:
        user.end(module, failed=failed)


@functools.cache
def _stand_in(kind: Kind, name: str) -> Callable[..., Any]:
    """Return the function for all modules: compiled programs are judged by its identity."""
    if kind == "router":
        return uncompiled(lambda module, *a, **k: _choose(Place(module, name, kind), a, k))
    if kind == "checkpoint":
        return uncompiled(
            lambda module, f, *a, **k: _checkpoint(Place(module, name, kind), f, a, k)
        )
    enter, leave_ = uncompiled(_enter), uncompiled(_exit)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = enter(module, name, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            leave_(module, name, failed=True)
            raise
        leave_(module, name, failed=False)
        return output

    return uncompiled(run, recursive=False)  # what it calls may be compiled


def uncompiled(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    # Older versions of torch give no reasons.
    is_told = "reason" in inspect.signature(torch.compiler.disable).parameters
    reason: dict[str, Any] = {"reason": _REASON} if is_told else {}
    return torch.compiler.disable(function, recursive, **reason)  # type: ignore[no-any-return, no-untyped-call]
