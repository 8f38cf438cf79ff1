"""Replay of the rows that the tokens of each pass find, for `replay.auto`."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MethodType
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from routetrace.client import _arguments as check
from routetrace.client._shells.sync import RouteClient
from routetrace.client.options import Equal
from routetrace.client.plan import FetchPlan, Rank
from routetrace.client.rows import FetchStats, Rows
from routetrace.codec.records import U32
from routetrace.common.errors import InvalidArgument, kind_of
from routetrace.common.layout import ModelLayout
from routetrace.common.values import Values
from routetrace.trainers._batches import batch_of
from routetrace.trainers._seats import uncompiled
from routetrace.trainers.agreement import Agreement

MissingSamples = Literal["live", "drop", "raise"]

_log = logging.getLogger(__name__)

#: Seconds between two lines about the progress.
_LOG_SECONDS = 60.0

#: Samples that were not found after a wait, and are not waited for again.
_MOST_GIVEN_UP = 1 << 16


@dataclass(frozen=True)
class AutoTotals(Values):
    """Sums over the passes of a model."""

    passes: int = 0
    """Passes with rows."""
    live_passes: int = 0
    """Passes that were left to the model: of `generate`, with a KV cache, skipped ones."""
    stats: FetchStats = field(default_factory=FetchStats)
    """Cost of the rows, and how many samples were found by their tokens."""
    agreement: Agreement = field(default_factory=Agreement)
    """Agreement of the model's own routers with the rows; empty without `compare`."""
    seconds: float = 0.0
    """Seconds that passes waited for their rows."""

    def __add__(self, other: AutoTotals) -> AutoTotals:
        return AutoTotals(*(getattr(self, n) + getattr(other, n) for n in self.__annotations__))

    def __str__(self) -> str:
        stats = self.stats
        words = [
            f"{self.passes} passes replayed",
            f"coverage {self.coverage:.4g}",
            f"{stats.samples_found} samples found, {stats.samples_not_found} not found, "
            f"{stats.samples_ambiguous} ambiguous",
            f"{stats.bytes_fetched / 1e6:.3g} MB in {self.seconds:.3g} s",
        ]
        if (share := self.agreement.disagreement) is not None:
            words.insert(2, f"disagreement {share:.4g}")
        return ", ".join(words)

    @property
    def coverage(self) -> float:
        """Share of the planned cells that had a row; 1 if none were planned."""
        return self.stats.valid_cells / self.stats.cells if self.stats.cells else 1.0

    def metrics(self, prefix: str = "routing/") -> dict[str, float]:
        """Return metrics by the names of `Agreement.metrics`, and shares of samples.

        Args:
            prefix: prefix of every name.
        """
        stats = self.stats
        samples = stats.samples_found + stats.samples_not_found + stats.samples_ambiguous
        found = {
            "coverage": self.coverage,
            "samples_not_found": stats.samples_not_found / max(1, samples),
            "samples_ambiguous": stats.samples_ambiguous / max(1, samples),
            "fetch_seconds": self.seconds,
            "fetch_bytes": float(stats.bytes_fetched),
        }
        named = {prefix + name: value for name, value in found.items()}
        return {**self.agreement.metrics(prefix), **named}


class _Block(Protocol):
    """Block of replay, as `routetrace.trainers.replay.Replay`."""

    @property
    def agreement(self) -> Agreement:
        """Agreement of the model's own routers with the rows."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> object: ...


class _Pass(NamedTuple):
    """A pass, and the block in which it runs; None if it is left to the model."""

    function: Callable[..., Any]
    block: _Block | None = None
    totals: AutoTotals = AutoTotals()


class AutoReplay:
    """Replay in all passes of a model; made by `routetrace.trainers.replay.auto`.

    A context manager, whose end is that of replay.

    Args:
        model: the transformers model, or what wraps it.
        client: reads the rows.
        begin: returns the block of a pass with these rows.
        missing: as in `auto`.
        equal: as in `auto`.
        wait_seconds: as in `auto`.
        skip: as in `auto`.
    """

    def __init__(
        self,
        model: nn.Module,
        client: RouteClient,
        begin: Callable[[Rows], _Block],
        *,
        missing: MissingSamples,
        equal: Equal,
        wait_seconds: float,
        skip: Callable[[Mapping[str, Any]], bool] | None,
    ) -> None:
        self.totals = AutoTotals()
        """Sums over all passes so far; replace it to start anew."""
        self.loss_mask: torch.Tensor | None = None
        """Bool, of the shape of the last pass's `input_ids`: False at the tokens of samples of
        which a row is missing. Multiply the loss by it with `missing="drop"`."""
        self._model = model
        self._client = client
        self._begin = begin
        self._missing = missing
        self._equal = equal
        self._wait = wait_seconds
        self._skip = skip
        layout = ModelLayout.from_config(model.config)
        self._layout = layout
        self._rank = Rank(layout.moe_layer_ids, flatten="batch")
        self._given_up: dict[bytes, None] = {}
        self._is_inside = self._is_paused = False
        self._logged_at = time.monotonic()
        if model in _AUTOS and not _AUTOS[model]._is_paused:
            raise InvalidArgument(
                field="model",
                value=f"a {type(model).__name__} that is replayed already",
                expected="one auto() for a model",
                remedy="close the other one",
            )
        self._original = model.forward
        self._before = vars(model).get("forward")
        self._signature = inspect.signature(self._original)
        self._wrapper = MethodType(_forward, model)
        vars(model)["forward"] = self._wrapper
        _AUTOS[model] = self

    def __enter__(self) -> AutoReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave all further passes to the model; backward passes of earlier ones stay right."""
        self._is_paused = True
        if vars(self._model).get("forward") is not self._wrapper:
            return  # wrapped since
        _AUTOS.pop(self._model, None)
        if self._before is None:
            del vars(self._model)["forward"]
        else:
            vars(self._model)["forward"] = self._before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the passes of a block to the model, such as those of an evaluation."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass:
        """Begin a pass: fetch its rows, and open the block in which it runs."""
        if self._is_inside or self._is_paused:
            return _Pass(self._original)
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        if self._is_left(given):
            self.totals += AutoTotals(live_passes=1)
            return _Pass(self._original)
        begun = time.monotonic()
        rows = self._rows(given)
        seconds = time.monotonic() - begun
        block = self._begin(rows)
        block.__enter__()
        self._is_inside = True
        return _Pass(self._model.forward, block, AutoTotals(1, 0, rows.stats, seconds=seconds))

    def leave(self, one: _Pass, error: BaseException | None) -> None:
        """End a pass."""
        if one.block is None:
            return
        self._is_inside = False
        one.block.__exit__(type(error) if error else None, error, None)
        if error is None:
            self.totals += one.totals + AutoTotals(agreement=one.block.agreement)
            self._tell()

    def _is_left(self, given: Mapping[str, Any]) -> bool:
        """Whether a pass is left to the model."""
        if given.get("past_key_values") is not None or given.get("use_cache") is True:
            return True  # of `generate`, or another kind of sampling
        if _has_no_adapter(self._model) or (self._skip is not None and self._skip(given)):
            return True
        if given.get("input_ids") is None:
            raise InvalidArgument(
                field="input_ids",
                value=None,
                expected="the token ids of the pass, which find its rows",
                remedy="leave such passes to the model: see skip, or use paused()",
            )
        return False

    def _rows(self, given: Mapping[str, Any]) -> Rows:
        plan = FetchPlan.make(self._layout, batch_of(given), self._rank)
        names = [blake2b(np.asarray(ids, U32).tobytes()).digest()[:16] for ids in plan.sequences]
        locations = self._client.locate(plan.sequences, equal=self._equal)
        waits = any(names[i] not in self._given_up for i in locations.unsettled)
        if not waits:
            plan = plan.with_locations(locations)
        rows = self._client.fetch(
            plan,
            missing="raise" if self._missing == "raise" else "mask",
            equal=self._equal,
            wait_for="end",
            timeout=self._wait,
        )
        if waits and rows.plan.locations:
            for i in rows.plan.locations.unsettled:
                self._given_up[names[i]] = None
            while len(self._given_up) > _MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
        ids = given["input_ids"]
        lacking = {number for number, _ in rows.missing}
        kept = ~np.isin(rows.plan.sample_of, [*lacking])
        self.loss_mask = torch.from_numpy(kept).reshape(ids.shape).to(ids.device)
        return rows

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._logged_at > _LOG_SECONDS:
            self._logged_at = now
            _log.info("routetrace: %s", self.totals)


_AUTOS: WeakKeyDictionary[nn.Module, AutoReplay] = WeakKeyDictionary()


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass:
    auto = _AUTOS.get(module)
    if auto is None:  # a copy of the model
        return _Pass(MethodType(type(module).forward, module))
    return auto.enter(args, kwargs)


def _leave(module: nn.Module, one: _Pass, error: BaseException | None) -> None:
    if one.block is not None:
        _AUTOS[module].leave(one, error)


_enter_uncompiled, _leave_uncompiled = uncompiled(_enter), uncompiled(_leave)


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    one = _enter_uncompiled(module, args, kwargs)
    try:
        output = one.function(*args, **kwargs)
    except BaseException as error:
        _leave_uncompiled(module, one, error)
        raise
    _leave_uncompiled(module, one, None)
    return output


_forward = uncompiled(_run, recursive=False)  # what it calls may be compiled


def _has_no_adapter(model: nn.Module) -> bool:
    """Whether a PEFT model computes without its adapters, as a reference does."""
    states = [
        bool(module.disable_adapters)
        for module in model.modules()
        if isinstance(getattr(type(module), "disable_adapters", None), property)
    ]
    return bool(states) and all(states)


def unwrapped(model: Any) -> nn.Module:
    """Return the transformers model in a PEFT model, a data-parallel one or a compiled one.

    Raises:
        InvalidArgument: if there is none.
    """
    found: Any = model
    while isinstance(found, nn.Module):
        inner = getattr(found, "_orig_mod", None)
        if inner is None and (base := getattr(found, "get_base_model", None)) is not None:
            inner = base()
        if inner is None and hasattr(found, "get_decoder") and hasattr(found, "config"):
            return found
        found = inner or getattr(found, "module", None)
    raise InvalidArgument(
        field="model", value=kind_of(model), expected="a transformers MoE model, or what wraps one"
    )


def checked(
    missing: Any, compare: Any, equal: Any, wait_seconds: Any, skip: Any
) -> tuple[MissingSamples, Equal, float]:
    """Check the options of `auto`."""
    check.choice("missing", missing, ("live", "drop", "raise"))
    check.flag("compare", compare)
    check.choice("equal", equal, ("refuse", "any"))
    if skip is not None and not callable(skip):
        raise InvalidArgument(field="skip", value=kind_of(skip), expected="a function, or None")
    return missing, equal, check.seconds("wait_seconds", wait_seconds)
