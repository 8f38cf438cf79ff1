"""The errors that docs/trainers.md quotes are those that are raised."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from routetrace.client import FetchPlan, MicroBatch, Rank, RouteClient, Sample
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from routetrace.trainers.diagnosis import check_alignment
from routetrace.trainers.replay import replay
from support.agents.feeder import Feeder
from support.models.tiny_models import tiny_model
from support.ranks.disagreement import MODELS, chosen, packed, routed, shifted
from support.ranks.rank_rows import rows_of as rank_rows
from support.ranks.rank_rows import trace_of
from support.servers.client_server import rows_of

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text("utf-8")
#: What is wrong -> what the page says, of both tables.
DOCUMENTED = {
    wrong: said
    for table in re.findall(r"^\| what is wrong \| what is said \|\n.*\n((?:\|.*\n)+)", PAGE, re.M)
    for wrong, said in re.findall(r"^\| (.+?) \| `(.+)` \|$", table, re.M)
}
LAYOUT = ModelLayout((2, 4, 5), 8, 40, 3)
TOKENS = np.arange(512)
PROMPT = 96


@pytest.fixture(scope="module")
def client():
    with run_server() as server:
        feeder = Feeder(server.target, LAYOUT)
        for name, tokens in (("a", TOKENS), ("again", TOKENS), ("again", edited(110))):
            handle = feeder.begin(name, prompt_len=PROMPT, prompt_token_ids=TOKENS[:PROMPT])
            feeder.step(rows_of(LAYOUT, 511), [(handle, 0, 511)])
            feeder.finish(handle, 512, token_ids=tokens)
        feeder.close()
        with RouteClient(server.target) as client:
            yield client


def fetch(client: RouteClient, sample: Sample, layout: ModelLayout = LAYOUT) -> None:
    client.fetch(FetchPlan.make(layout, MicroBatch.packed([sample]), Rank(layout.layer_ids)))


def edited(position: int = 100) -> np.ndarray:
    tokens = TOKENS.copy()
    tokens[position] = 7
    return tokens


def split(client: RouteClient) -> None:
    samples = [Sample.padding(8), Sample.padding(8), Sample.padding(8), Sample.padding(30)]
    FetchPlan.make(LAYOUT, MicroBatch.packed(samples), Rank(LAYOUT.layer_ids, cp_size=2))


def check(rows: object, trainer_ids: np.ndarray) -> None:
    check_alignment(rows, trainer_ids)


def moved(_: RouteClient) -> None:
    of = routed(MODELS["deepseek"], [120, 40, 120], 2)
    plan, rows = packed(of._replace(engine=[shifted(ids, 1) for ids in of.engine]))
    check(rows, chosen(plan, of.trainer))


def renumbered(_: RouteClient) -> None:
    of = routed(MODELS["deepseek"], [200], 4)
    trace = trace_of(of.layout, np.roll(of.engine[0], -3, axis=1))
    check(trace, of.trainer[0])


def swapped(_: RouteClient) -> None:
    of = routed(MODELS["deepseek"], [300, 300], 5)
    plan, rows = packed(of._replace(engine=of.engine[::-1]))
    check(rows, chosen(plan, of.trainer))


def unrelated(_: RouteClient) -> None:
    layout = MODELS["deepseek"]
    keys = np.random.default_rng(0).random((2, 200, len(layout.layer_ids), layout.num_experts))
    ours, theirs = keys.argsort(axis=-1)[..., : layout.top_k].astype(np.uint8)
    check(trace_of(layout, ours), theirs)


def padded_otherwise(_: RouteClient) -> None:
    model, layout = tiny_model("qwen3_moe")
    tokens = np.arange(4, 13)
    samples = [Sample.of("a", token_ids=tokens), Sample.of("b", token_ids=np.arange(12))]
    batch = MicroBatch.padded(samples, 12, padding_side="right")
    plan = FetchPlan.make(layout, batch, Rank(layout.layer_ids, flatten="batch"))
    rows = rows_of(layout, 12)
    with replay(model, rank_rows(plan, [rows, rows])):
        model(torch.from_numpy(np.stack([np.r_[3, 3, 3, tokens], np.arange(12)])))


MISTAKES: dict[str, Callable[[RouteClient], None]] = {
    "another number of tokens": lambda c: fetch(c, Sample.of("a", 511)),
    "tokens shifted by padding or BOS": lambda c: fetch(
        c, Sample.of("a", token_ids=np.concatenate([[1], TOKENS]))
    ),
    "tokenized again, a template rendered again": lambda c: fetch(
        c, Sample.of("a", token_ids=edited())
    ),
    "an id that was used again, and tokens of none of its answers": lambda c: fetch(
        c, Sample.of("again", token_ids=edited())
    ),
    "another model, another numbering of layers": lambda c: fetch(
        c, Sample.of("a", 512), ModelLayout((3, 5, 6), 8, 40, 3)
    ),
    "lengths that cannot be split": split,
    "padding on the other side, samples in another order (Transformers)": padded_otherwise,
    "shifted by up to 8 tokens, all or from some place on": moved,
    "layers off by one, MoE layers counted from 0, layers in another order": renumbered,
    "samples of a batch swapped": swapped,
    "anything else that has nothing to do with these tokens": unrelated,
}


def test_every_documented_error_is_provoked():
    assert list(MISTAKES) == list(DOCUMENTED)


@pytest.mark.parametrize("wrong", MISTAKES)
def test_it_is_the_real_message(wrong, client):
    with pytest.raises(InvalidArgument) as caught:
        MISTAKES[wrong](client)
    message, said = str(caught.value), DOCUMENTED[wrong]
    if wrong in list(MISTAKES)[5:]:  # its figures depend on the random numbers of a numpy
        message, said = (re.sub(r"\d[\d,]*", "N", text) for text in (message, said))
    parts = map(re.escape, said.split("..."))
    assert re.search(".*".join(parts), message), message
