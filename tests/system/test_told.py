"""What an agent is given reaches the store and readers; what nobody gave is unknown there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent
from routetrace.client import UNKNOWN_VERSION, Incomplete, InvalidArgument, Retired, RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.common.model_hash import model_hash
from routetrace.server.testing import run_server
from support.agents.feeder import Feeder

LAYOUT = ModelLayout((0, 1), 2, 16, 2)


def rows(count: int) -> np.ndarray:
    order = np.random.default_rng(count).random((count, 2, 16)).argsort(axis=2)
    return order[:, :, :2].astype(np.uint8)


def record(agent: CaptureAgent, name: str, *versions: int | None, **begin: object) -> None:
    """Two rows of each version; None: unknown from then on."""
    handle = agent.begin(name, prompt_len=2, **begin)
    for at, version in enumerate(versions):
        agent.set_weight_version(version)
        agent.step(rows(2), [[handle, 2 * at, 2]])
    agent.finish(handle, 2 * len(versions) + 1)


def test_a_version_that_nobody_gave_is_unknown(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path}
    with run_server(**settings) as server, RouteClient(server.target) as client:
        with CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent:
            handle = agent.begin("never", prompt_len=2)
            agent.step(rows(2), [[handle, 0, 2]])
            agent.finish(handle, 3)
            record(agent, "zero", 0)
            record(agent, "both", 5, None)
            assert agent.flush()
            [listed] = client.agents()
            assert listed.weight_version is None
        never, zero, both = (client.get(name) for name in ("never", "zero", "both"))
        assert never.weight_versions == ((0, 2, None),)
        assert (never.min_weight_version, never.max_weight_version) == (None, None)
        assert zero.weight_versions == ((0, 2, 0),)
        assert both.weight_versions == ((0, 2, 5), (2, 4, None))
        assert (both.min_weight_version, both.max_weight_version) == (5, 5)
        unknown = {trace.trace_id: trace.unknown_weight_versions for trace in client.find()}
        assert unknown == {"never": True, "zero": False, "both": True}
        with pytest.raises(Incomplete, match="other_version"):
            client.get("both", weight_version=5)
        with pytest.raises(Incomplete, match="computed by an unknown version, not 0"):
            client.get("never", weight_version=0)
        with pytest.raises(InvalidArgument, match="weight_version"):
            client.get("never", weight_version=UNKNOWN_VERSION)
    with run_server(**settings) as server, RouteClient(server.target) as client:  # from its log
        assert client.get("both").weight_versions == ((0, 2, 5), (2, 4, None))
        assert [o.weight_version for o in client.describe("both").origins] == [5, None]
        # An unknown version is older than all others.
        assert client.retire_through(-3) == Retired(1, 1)
        assert client.retire_through(5) == Retired(2, 1)


def test_an_unknown_version_cannot_be_given(tmp_path: Path) -> None:
    with (
        run_server(data_dir=tmp_path) as server,
        CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent,
        pytest.raises(InvalidArgument, match="version"),
    ):
        agent.set_weight_version(UNKNOWN_VERSION)


def test_an_agent_of_0_8_tells_version_0_where_nobody_gave_one(tmp_path: Path) -> None:
    with run_server(data_dir=tmp_path) as server, RouteClient(server.target) as client:
        feeder = Feeder(server.target, LAYOUT, says_unknown_versions=False)
        for version in (0, 7):
            handle = feeder.begin(f"v{version}", prompt_len=2)
            feeder.set_weight_version(version)
            feeder.step(rows(2), [(handle, 0, 2)])
            feeder.finish(handle, 3)
        feeder.flush()
        feeder.stream.close()
        assert client.get("v0").weight_versions == ((0, 2, None),)
        assert client.get("v7").weight_versions == ((0, 2, 7),)


def test_readers_learn_the_nonce_of_a_request(tmp_path: Path) -> None:
    with run_server(data_dir=tmp_path) as server, RouteClient(server.target) as client:
        with CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent:
            record(agent, "plain", 1)
            record(agent, "named", 1, nonce=2**53 - 1)
        assert client.stat("named").nonce == client.get("named").nonce == 2**53 - 1
        assert client.stat("plain").nonce is None
        assert [i.nonce for i in client.describe("named").incarnations] == [2**53 - 1]


@pytest.mark.parametrize("nonce", [0, -1, 2**53, "7", 1.5])
def test_a_nonce_that_json_cannot_carry_is_refused(tmp_path: Path, nonce: object) -> None:
    with (
        run_server(data_dir=tmp_path) as server,
        CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent,
        pytest.raises(InvalidArgument, match="nonce"),
    ):
        agent.begin("r", nonce=nonce)


@pytest.mark.parametrize("name", ["", 7, "x" * 513])
def test_a_transfer_id_is_an_id(tmp_path: Path, name: object) -> None:
    with (
        run_server(data_dir=tmp_path) as server,
        CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent,
    ):
        with pytest.raises(InvalidArgument, match="transfer_id"):
            agent.begin("r", transfer_id=name)
        handle = agent.begin("r")
        with pytest.raises(InvalidArgument, match="transfer_id"):
            agent.finish(handle, 1, transfer_id=name)
        agent.finish(handle, 1)


def test_a_model_is_named_by_its_configuration() -> None:
    config = {"num_experts": 16, "rope": {"theta": 1e4, "_name_or_path": "a"}, "layers": (1, 2)}
    elsewhere = {**config, "_name_or_path": "/models/step-7", "transformers_version": "5.9.0"}
    assert model_hash(config) == model_hash(elsewhere) == model_hash({**config, "layers": [1, 2]})
    others = [{**config, "num_experts": 17}, {**config, "rope": {"theta": 1e6}}]
    assert len({model_hash(config), model_hash(config, "fp8"), *map(model_hash, others)}) == 4
    with pytest.raises(InvalidArgument, match="config"):
        model_hash("qwen")
    for wrong in ("qwen", "0" * 15, "g" * 16, 7):
        with pytest.raises(InvalidArgument, match="model"):
            CaptureAgent(target="localhost", engine_id="e", layout=LAYOUT, model=wrong)
