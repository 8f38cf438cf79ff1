"""Refusals of replay in Megatron, which change nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
from trainer_runs import megatron_cpu  # isort: skip  # noqa: F401  # first of all of megatron

from megatron.core.transformer.moe.router_replay import RouterReplay

from routetrace.client import MicroBatch, ModelLayout, RouteClient, Sample, Unavailable
from routetrace.client.rows import Rows
from routetrace.common.errors import InvalidArgument
from routetrace.trainers._megatron_tokens import layout_of
from routetrace.trainers.megatron import replay
from trainer_runs.megatron_passes import FULL, forward, make_model, make_rows


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("moe_enable_routing_replay", lambda router: setattr(router, "router_replay", None)),
        ("moe_router_fusion", None),
        ("moe_router_force_load_balancing", None),
        ("moe_router_force_biased", lambda router: _configure(router, 0.0)),
        ("moe_expert_capacity_factor", lambda router: _configure(router, 1.0)),
        ("overlap_moe_expert_parallel_comm", None),
        ("moe_router_load_balancing_type", lambda r: setattr(r, "routing_type", "sinkhorn")),
        (
            "moe_router_load_balancing_type",
            lambda r: setattr(r, "routing_type", ["quantile_balancing", "none"]),
        ),
    ],
)
def test_what_bypasses_replay_is_refused(field: str, change: Any) -> None:
    model = make_model()
    router = model.decoder.layers[2].mlp.router
    change = change or (lambda router: _configure(router, True))
    _configure.field = field  # type: ignore[attr-defined]
    change(router)
    with pytest.raises(InvalidArgument, match=field) as caught:
        replay(model, [])
    assert "layer" in str(caught.value)


def test_rows_or_tokens_are_given() -> None:
    model, batch = make_model(), MicroBatch.packed([Sample.of(token_ids=[1, 2])])
    with RouteClient("127.0.0.1:1", timeout=0.1) as client:
        for wrong, message in (
            ({}, "rows is None"),
            ({"rows": [], "client": client, "tokens": [batch]}, "rows is a list"),
            ({"tokens": [batch]}, "rows is None; expected rows, or both client and tokens"),
            ({"rows": [], "equal": "any"}, "equal is any; expected tokens beside it"),
            ({"client": client, "tokens": batch}, "tokens is a MicroBatch"),
            ({"client": client, "tokens": ["a"]}, r"tokens\[0\] is a str"),
            ({"client": client, "tokens": [batch], "missing": "drop"}, "missing is 'drop'"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                replay(model, **wrong)
        with pytest.raises(Unavailable):
            replay(model, client=client, tokens=[batch])


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, (0, 1, 2, 3)), (2, (0, 2)), ([0, 1, 1, 0], (1, 2))]
)
def test_the_layout_of_a_configuration(frequency: Any, layers: tuple[int, ...]) -> None:
    config = SimpleNamespace(
        num_layers=4, moe_layer_freq=frequency, num_moe_experts=8, moe_router_topk=2
    )
    assert layout_of(config) == ModelLayout(layers, 4, 8, 2)
    config.moe_layer_freq = [1]
    with pytest.raises(InvalidArgument, match="moe_layer_freq"):
        layout_of(config)


def _configure(router: Any, value: Any) -> None:
    setattr(router.config, _configure.field, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("scope", "refused"),
    [([], True), (["attn"], False), (["attn", "moe_router"], True), (["moe"], True)],
)
def test_graphs_that_hold_a_router_are_refused(scope: list[str], refused: bool) -> None:
    model = make_model()
    model.config.cuda_graph_impl = "transformer_engine"
    model.config.cuda_graph_scope = scope
    if refused:
        with pytest.raises(InvalidArgument, match="cuda_graph_impl"):
            replay(model, [])
    else:
        replay(model, [])


def test_a_router_that_does_not_ask_is_noticed() -> None:
    model = make_model()
    router = model.decoder.layers[2].mlp.router
    # As a version that knows another way would.
    router.routing = lambda logits, **_: router.sinkhorn_load_balancing(logits.flatten(0, 1))
    with pytest.raises(InvalidArgument, match=r"routers of layers \[2\]"):  # noqa: SIM117
        with replay(model, [make_rows(0)]):
            forward(model, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows of 0 micro-batches"),
        ([make_rows(0), make_rows(1)], "rows of 2 micro-batches"),
        ([make_rows(0, tokens=7)], "rows of 7 tokens"),
        ([make_rows(0, layers=(1, 3))], r"missing are \[2\]"),
        ([make_rows(0, top_k=2)], "top-2 of 8"),
        ([make_rows(0, experts=9)], "top-3 of 9"),
        ([make_rows(0, decoder_layers=8)], "8 decoder layers"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list[Rows], message: str) -> None:
    model = make_model()
    with pytest.raises(InvalidArgument, match=message), replay(model, rows):
        forward(model, 0)
    assert all(
        isinstance(m.router_replay, RouterReplay)
        for m in model.modules()
        if hasattr(m, "router_replay")
    )


@pytest.mark.parametrize("row", [[1, 2, 1], [0, 1, 8], [255, 1, 2]])
def test_rows_that_the_dispatcher_would_choke_on_are_refused(row: list[int]) -> None:
    rows = make_rows(0)
    rows.valid[1, 4] = True
    rows.topk_ids[1, 4] = row
    model = make_model()
    with pytest.raises(InvalidArgument, match="token 4 at layer 2"), replay(model, [rows]):
        forward(model, 0)


def test_routers_outside_of_a_pass_are_refused() -> None:
    model = make_model()
    router = model.decoder.layers[1].mlp.router
    hidden = torch.randn(6, 1, 32)
    with replay(model, [make_rows(0)]):
        with pytest.raises(InvalidArgument, match="outside of a forward pass"):
            router(hidden)
        forward(model, 0).float().mean().backward()
        with pytest.raises(InvalidArgument, match="outside of a forward pass"):
            router(hidden)


def test_a_backward_pass_behind_the_end_is_refused() -> None:
    model = make_model(**FULL)
    with replay(model, [make_rows(0)]):
        output = forward(model, 0)
    with pytest.raises(InvalidArgument, match="after the end"):
        output.float().mean().backward()


def test_one_replay_at_a_time() -> None:
    model = make_model()
    own = model.decoder.layers[1].mlp.router.router_replay
    with replay(model, [make_rows(0)]):
        with pytest.raises(InvalidArgument, match="replays already"), replay(model, []):
            pass
        forward(model, 0)
    assert model.decoder.layers[1].mlp.router.router_replay is own
