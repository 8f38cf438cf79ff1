"""Passes that find their rows by their tokens: gradients are those of hard-wired routers.

The truth is a model without checkpoints whose routers look up the ids that the engine reported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from routetrace.client import DeadlineExceeded, Incomplete, RouteClient
from routetrace.common.errors import InvalidArgument
from routetrace.server.testing import run_server
from routetrace.trainers.replay import auto
from support.models.hard_wired import hard_wire
from support.models.rollouts import Rollouts
from support.models.tiny_models import PAD, VOCABULARY, tiny_model
from support.ranks.gloo_ranks import run_ranks

MODEL, LAYOUT = tiny_model("qwen3_moe")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with run_server() as server:
        yield server.target


@pytest.fixture
def rollouts(target: str, request: pytest.FixtureRequest) -> Iterator[Rollouts]:
    made = Rollouts(target, request.node.name[:100], LAYOUT, VOCABULARY)
    yield made
    made.close()


@pytest.fixture
def client(rollouts: Rollouts) -> Iterator[RouteClient]:
    with RouteClient(rollouts.target, run=rollouts.run) as client:
        yield client


class Batch:
    """A micro-batch, as a trainer gives it to a model.

    Args:
        sequences: tokens of each.
        kind: "left", "right" or "both" sides are padded; "packed".
    """

    def __init__(self, sequences: list[torch.Tensor], kind: str = "both") -> None:
        self.kwargs: dict[str, Any] = {"use_cache": False}
        self.places: list[tuple[int, torch.Tensor]] = []
        if kind == "packed":
            at = 0
            for tokens in sequences:
                self.places.append((at, tokens))
                at += len(tokens)
            ids = torch.cat(sequences)[None]
            self.kwargs["position_ids"] = torch.cat([torch.arange(len(s)) for s in sequences])[None]
            self.there = torch.ones_like(ids, dtype=torch.bool)
        else:
            width = max(map(len, sequences)) + 3
            ids = torch.full((len(sequences), width), PAD)
            self.there = torch.zeros_like(ids, dtype=torch.bool)
            for row, tokens in enumerate(sequences):
                free = width - len(tokens)
                start = {"left": free, "right": 0, "both": row % (free + 1)}[kind]
                ids[row, start : start + len(tokens)] = tokens
                self.there[row, start : start + len(tokens)] = True
                self.places.append((row * width + start, tokens))
            self.kwargs["attention_mask"] = self.there.long()
        self.ids = ids

    def loss(self, model: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over the tokens that are no padding, or those of a mask."""
        logits = model(input_ids=self.ids, **self.kwargs).logits
        kept = self.there if mask is None else self.there & mask
        loss: torch.Tensor = logits[kept].float().pow(2).sum() / 1000
        return loss


def wired(rollouts: Rollouts, batch: Batch) -> Any:
    """A model whose routers choose what the engine chose for a batch."""
    model = copy.deepcopy(MODEL).train()
    ids, valid = rollouts.truth(batch.places, batch.ids.numel())
    hard_wire(model, LAYOUT.layer_ids, ids, valid)
    return model


def trained(how: str = "plain") -> Any:
    model = copy.deepcopy(MODEL).train()
    if how != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    return model


def gradients(*models: Any) -> dict[str, torch.Tensor]:
    """The sums of the gradients of models."""
    sums: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad
    return sums


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert float(grad.abs().sum()) > 0, name
        torch.testing.assert_close(
            found[name], grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("how", ["plain", "not reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["left", "right", "both", "packed"])
def test_gradients_are_those_of_the_engines_choices(
    rollouts: Rollouts, client: RouteClient, how: str, kind: str
) -> None:
    batch = Batch(rollouts.answers([9, 4, 12]), kind)
    truth, model = wired(rollouts, batch), trained(how)
    batch.loss(truth).backward()
    live = batch.loss(MODEL)
    with auto(model, client, compare=True) as replayed:
        loss = batch.loss(model)
    loss.backward()  # behind the end of replay
    check(gradients(model), gradients(truth))
    totals = replayed.totals
    assert (totals.passes, totals.live_passes, totals.coverage) == (1, 0, 1.0)
    assert totals.stats.samples_found == 3
    assert totals.agreement.disagreement > 0
    assert totals.metrics()["routing/coverage"] == 1
    assert "1 passes replayed, coverage 1, disagreement" in str(totals)
    torch.testing.assert_close(batch.loss(model), live)  # closed


@pytest.mark.parametrize("how", ["not reentrant", "reentrant"])
def test_micro_batches_in_flight_and_passes_between(
    rollouts: Rollouts, client: RouteClient, how: str
) -> None:
    batches = [Batch(rollouts.answers([6, 10]), kind) for kind in ("left", "both", "packed")]
    truths = [wired(rollouts, batch) for batch in batches]
    for truth, batch in zip(truths, batches, strict=True):
        batch.loss(truth).backward()
    model, losses = trained(how), []
    with auto(model, client) as replayed:
        for batch in batches:
            losses.append(batch.loss(model))
            with torch.no_grad():
                model.generate(
                    batch.ids[:, :4], max_new_tokens=2, do_sample=False, pad_token_id=PAD
                )
                old = batch.loss(model)
            torch.testing.assert_close(old, losses[-1].detach())
            with replayed.paused(), torch.no_grad():
                torch.testing.assert_close(batch.loss(model), batch.loss(MODEL).detach())
        for loss in reversed(losses):
            loss.backward()
    check(gradients(model), gradients(*truths))
    assert replayed.totals.passes == 2 * len(batches)
    assert replayed.totals.live_passes >= 2 * len(batches)  # of generate


def test_equal_samples_get_a_request_each(rollouts: Rollouts, client: RouteClient) -> None:
    [tokens, other] = [rollouts.tokens(7), *rollouts.answers([11])]
    for _ in range(3):
        rollouts.add(tokens)
    batch = Batch([tokens, other, tokens, tokens])
    truth, model = wired(rollouts, batch), trained()
    batch.loss(truth).backward()
    with auto(model, client, equal="any") as replayed:
        batch.loss(model).backward()
    check(gradients(model), gradients(truth))
    assert replayed.totals.stats.samples_of_several == 3
    with auto(model, client) as replayed, torch.no_grad():
        batch.loss(model)
    assert replayed.totals.stats.samples_ambiguous == 3
    assert replayed.loss_mask is not None
    assert (replayed.loss_mask & batch.there).any(dim=1).tolist() == [False, True, False, False]


def test_a_sample_that_is_unknown(rollouts: Rollouts, client: RouteClient) -> None:
    known = rollouts.answers([9, 5])
    partly = rollouts.tokens(8)
    rollouts.add(partly, missing=[3])
    batch = Batch([known[0], rollouts.tokens(6), known[1]])

    truth, model = wired(rollouts, batch), trained()  # its routers decide where there are no rows
    batch.loss(truth).backward()
    with auto(model, client, missing="live", wait_seconds=0.2) as replayed:
        batch.loss(model).backward()
    check(gradients(model), gradients(truth))
    assert replayed.totals.stats.samples_not_found == 1
    assert replayed.totals.coverage == (8 + 4) / (8 + 5 + 4)

    rest = Batch(known)
    truth, model = wired(rollouts, rest), trained()
    rest.loss(truth).backward()
    with auto(model, client, missing="drop", wait_seconds=0.2) as replayed:
        logits = model(input_ids=batch.ids, **batch.kwargs).logits
        assert replayed.loss_mask is not None
        kept = batch.there & replayed.loss_mask
        (logits[kept].pow(2).sum() / 1000).backward()
    check(gradients(model), gradients(truth))

    model = trained()
    with auto(model, client, missing="raise", wait_seconds=0.2), pytest.raises(DeadlineExceeded):
        batch.loss(model)
    with auto(model, client, missing="raise", wait_seconds=0.2), pytest.raises(Incomplete):
        Batch([partly]).loss(model)
    batch = Batch([partly, known[0]])
    with auto(model, client, missing="drop") as replayed, torch.no_grad():
        batch.loss(model)
    assert replayed.loss_mask is not None
    assert (replayed.loss_mask & batch.there).any(dim=1).tolist() == [False, True]


def test_what_was_waited_for_in_vain_is_not_waited_for_again(
    rollouts: Rollouts, client: RouteClient
) -> None:
    batch, model = Batch([rollouts.tokens(9)]), trained()
    waits: list[Any] = []
    fetch = client.fetch

    def counted(*args: Any, **kwargs: Any) -> Any:
        waits.append(args[0].locations)
        return fetch(*args, **kwargs)

    client.fetch = counted  # type: ignore[method-assign]
    with auto(model, client, wait_seconds=0.2), torch.no_grad():
        for _ in range(3):
            batch.loss(model)
    assert [each is None for each in waits] == [True, False, False]


class Adapted(nn.Module):
    """What PEFT puts around a model, and calls `forward` of."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> Any:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.forward(*args, **kwargs)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, Adapted])
def test_wrapped_models(rollouts: Rollouts, client: RouteClient, wrap: Callable[..., Any]) -> None:
    batch = Batch(rollouts.answers([9, 4]))
    truth, inner = wired(rollouts, batch), trained()
    expected = batch.loss(truth).detach()
    kwargs = {"backend": "eager"} if wrap is torch.compile else {}
    model = wrap(inner, **kwargs)
    with torch.no_grad():
        live = batch.loss(model)  # compiled before
        with auto(model, client) as replayed:
            for _ in range(2):
                torch.testing.assert_close(batch.loss(model), expected)
        torch.testing.assert_close(batch.loss(model), live)
    assert replayed.totals.passes == 2


def test_adapters_of_peft(rollouts: Rollouts, client: RouteClient) -> None:
    peft = pytest.importorskip("peft", reason="peft is in the environments of make test-frameworks")
    batch = Batch(rollouts.answers([9, 4]))
    truth, inner = wired(rollouts, batch), trained()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(inner, config)
    with torch.no_grad(), auto(model, client) as replayed:
        torch.testing.assert_close(batch.loss(model), batch.loss(truth))
        with model.disable_adapter():  # a reference
            torch.testing.assert_close(batch.loss(model), batch.loss(MODEL))
    assert (replayed.totals.passes, replayed.totals.live_passes) == (1, 1)


def test_layers_that_are_compiled(rollouts: Rollouts, client: RouteClient) -> None:
    batch = Batch(rollouts.answers([9, 4]))
    truth, model = wired(rollouts, batch), trained()
    batch.loss(truth).backward()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with auto(model, client):
        batch.loss(model).backward()
    check(gradients(model), gradients(truth))


def test_a_copy_is_not_replayed(rollouts: Rollouts, client: RouteClient) -> None:
    batch = Batch(rollouts.answers([9, 4]))
    model = trained()
    with torch.no_grad(), auto(model, client) as replayed:
        reference = copy.deepcopy(model)
        torch.testing.assert_close(batch.loss(reference), batch.loss(MODEL))
        assert replayed.totals.passes == 0
        torch.testing.assert_close(batch.loss(model), batch.loss(wired(rollouts, batch)))


def test_skipped_passes(rollouts: Rollouts, client: RouteClient) -> None:
    batch, model, seen = Batch(rollouts.answers([9, 4])), trained(), []

    def skip(given: Any) -> bool:
        seen.append(sorted(given))
        return len(seen) == 1

    with torch.no_grad(), auto(model, client, skip=skip) as replayed:
        torch.testing.assert_close(batch.loss(model), batch.loss(MODEL))
        torch.testing.assert_close(batch.loss(model), batch.loss(wired(rollouts, batch)))
    assert seen == [["attention_mask", "input_ids", "use_cache"]] * 2
    assert (replayed.totals.passes, replayed.totals.live_passes) == (1, 1)


def test_what_cannot_be_replayed_is_refused(rollouts: Rollouts, client: RouteClient) -> None:
    batch, model = Batch(rollouts.answers([9, 4])), trained()
    with auto(model, client):
        embeds = model.get_input_embeddings()(batch.ids)
        with pytest.raises(InvalidArgument, match="input_ids is None; expected the token ids"):
            model(inputs_embeds=embeds, use_cache=False)
        wide = torch.zeros(2, 1, batch.ids.shape[1], batch.ids.shape[1])
        with pytest.raises(InvalidArgument, match="attention_mask is a Tensor"):
            model(input_ids=batch.ids, attention_mask=wide, use_cache=False)
        holes = batch.kwargs["attention_mask"].clone()
        holes[0, int(holes[0].argmax()) + 1] = 0
        with pytest.raises(InvalidArgument, match=r"attention_mask\[0\]"):
            model(input_ids=batch.ids, attention_mask=holes, use_cache=False)
        with pytest.raises(InvalidArgument, match="is replayed already"):
            auto(model, client)
    for wrong, message in (
        ({"missing": "mask"}, "missing is 'mask'"),
        ({"compare": 1}, "compare is 1"),
        ({"equal": "all"}, "equal is 'all'"),
        ({"wait_seconds": 0}, "wait_seconds is 0"),
        ({"skip": 3}, "skip is an int"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            auto(model, client, **wrong)
    with pytest.raises(InvalidArgument, match="model is a Linear; expected a transformers MoE"):
        auto(nn.Linear(2, 2), client)
    with pytest.raises(InvalidArgument, match="client is a str"):
        auto(model, "localhost")  # type: ignore[arg-type]
    assert "forward" not in vars(model)


def sharded(rank: int, target: str, run: str, batches: list[Batch], expected: Any) -> list[str]:
    """Gradients of FSDP2 over both batches that differ from those of the hard-wired models."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = trained("not reentrant")
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with RouteClient(target, run=run) as client, auto(model, client) as replayed:
        loss = batches[rank].loss(model)
        loss.backward()
        assert replayed.totals.coverage == 1
    wrong = []
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor()
        if not torch.allclose(grad, expected[name] / 2, rtol=1e-4, atol=1e-5):
            wrong.append(name)
    return wrong


def test_fsdp2_over_two_processes(rollouts: Rollouts) -> None:
    batches = [Batch(rollouts.answers([9, 4]), "both"), Batch(rollouts.answers([5, 7]), "left")]
    truths = [wired(rollouts, batch) for batch in batches]
    for truth, batch in zip(truths, batches, strict=True):
        batch.loss(truth).backward()
    expected = gradients(*truths)
    found = run_ranks(2, sharded, rollouts.target, rollouts.run, batches, expected)
    assert found == [[], []]
