"""The built wheel in bare environments, beside old and new protobuf and grpcio (needs the network).

Not part of a plain test run: `make test-install`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support.version_pairs import PAIRS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [pytest.mark.install, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


#: Rooms of which modules may need torch or transformers, which their users have.
TORCH_ROOMS = (
    "routetrace.trainers.",
    "routetrace.experts.",
    "routetrace.capture_agent.engines.",
    "routetrace.capture_agent.transformers",  # its short name
)
#: Modules of these rooms that need neither.
TORCH_FREE = (
    "routetrace.trainers.dialects.verl",
    "routetrace.experts.policy",
    "routetrace.capture_agent.engines.parallel",
    "routetrace.capture_agent.engines.vllm.schedule",
)

IMPORT_ALL = """
import importlib, json, pkgutil
imported, refused = [], {}
packages = "v1", "common", "codec", "client", "trainers", "experts", "capture_agent"
for package in map("routetrace.{}".format, packages):
    path = importlib.import_module(package).__path__
    # Packages below that need more are refused like modules.
    ignored = lambda name: None
    modules = pkgutil.walk_packages(path, f"{package}.", ignored)
    for name in [package, *(module.name for module in modules)]:
        try:
            importlib.import_module(name)
            imported.append(name)
        except ImportError as error:
            refused[name] = error.name
print(json.dumps([imported, refused]))
"""

ROUND_TRIP = """
import sys
from concurrent import futures
import google.protobuf, grpc
from routetrace.v1 import routetrace_pb2 as pb, routetrace_pb2_grpc as pb_grpc
from routetrace.common import errors

class Ingest(pb_grpc.IngestServiceServicer):
    def Ingest(self, request_iterator, context):
        for request in request_iterator:
            if request.WhichOneof("message") == "hello":
                assert request.hello.attributes["model"] == "tiny"
                assert list(request.hello.layout.layer_ids) == [1, 2, 5]
                yield pb.IngestResponse(welcome=pb.Welcome(epoch=3, next_sequence=1))
            else:
                assert request.chunk.payload == bytes(1 << 20)
                yield pb.IngestResponse(ack=pb.Ack(sequence=request.chunk.sequence))

class Trace(pb_grpc.TraceServiceServicer):
    def GetTrace(self, request, context):
        yield pb.GetTraceResponse(info=pb.TraceInfo(trace_id=request.trace_id))
        yield pb.GetTraceResponse(payload=b"rows", end=pb.ReadEnd(num_spans=1 << 40))
    def StatTrace(self, request, context):
        error = errors.NotFound(field="trace_id", value=request.trace_id, expected="a trace")
        detail = error.to_detail().SerializeToString()
        context.set_trailing_metadata(((errors.ERROR_METADATA_KEY, detail),))
        context.abort(error.status, error.message)

server = grpc.server(futures.ThreadPoolExecutor(2))
pb_grpc.add_IngestServiceServicer_to_server(Ingest(), server)
pb_grpc.add_TraceServiceServicer_to_server(Trace(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    layout = pb.RoutingLayout(layer_ids=[1, 2, 5], id_type=pb.ID_TYPE_UINT8)
    hello = pb.Hello(run="r", layout=layout, attributes={"model": "tiny"})
    sent = [pb.IngestRequest(hello=hello)]
    sent += [
        pb.IngestRequest(chunk=pb.Chunk(sequence=i, header_crc32=2**32 - 1, payload=bytes(1 << 20)))
        for i in (1, 2, 3)
    ]
    answers = list(pb_grpc.IngestServiceStub(channel).Ingest(iter(sent), timeout=20))
    assert answers[0].welcome.epoch == 3
    assert [answer.ack.sequence for answer in answers[1:]] == [1, 2, 3]
    stub = pb_grpc.TraceServiceStub(channel)
    first, last = stub.GetTrace(pb.GetTraceRequest(trace_id="t"), timeout=20)
    assert first.info.trace_id == "t"
    assert last.payload == b"rows" and last.end.num_spans == 1 << 40
    try:
        stub.StatTrace(pb.StatTraceRequest(trace_id="none"), timeout=20)
    except grpc.RpcError as error:
        detail = dict(error.trailing_metadata())[errors.ERROR_METADATA_KEY]
        back = errors.from_detail(pb.ErrorDetail.FromString(detail))
        assert isinstance(back, errors.NotFound) and back.value == "none", back
    else:
        raise AssertionError("no error")
server.stop(None).wait()
print(google.protobuf.__version__, grpc.__version__)
"""

END_TO_END = """
import numpy as np
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.server.testing import run_server
from routetrace.common.layout import ModelLayout

layout = ModelLayout((1, 2, 4), num_hidden_layers=6, num_experts=40, top_k=3)
ids = np.random.default_rng(0).permuted(np.tile(np.arange(40), (300, 3, 1)), axis=2)[:, :, :3]
with run_server() as server:
    with CaptureAgent(AgentConfig(server.target, "engine", layout)) as agent:
        handle = agent.begin("request", prompt_len=200)
        agent.step(ids, np.array([[handle, 0, 300]]))
        agent.finish(handle, 301)
    with RouteClient(server.target) as client:
        trace = client.get("request", wait_for="end", timeout=30)
    assert trace.complete
    np.testing.assert_array_equal(trace.topk_ids, ids)
"""


class Environment:
    """A virtual environment without pip, filled from outside."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin/python"
        _call(sys.executable, "-m", "venv", "--without-pip", str(directory))

    def install(self, *requirements: str) -> None:
        python = str(self.python)
        command = [sys.executable, "-m", "pip", "--python", python, "install"]
        if importlib.util.find_spec("uv"):  # a tenth of the time
            command = [sys.executable, "-m", "uv", "pip", "install", "--python", python]
        _call(*command, "--quiet", "--only-binary=:all:", *requirements)

    def run(self, *args: str) -> str:
        """Run Python, away from the sources and from what the caller's environment adds."""
        return _call(str(self.python), "-I", *args, cwd=self.directory)


def _call(*args: str, cwd: Path | None = None) -> str:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "ROUTETRACE_", "COVERAGE"))
    }
    done = subprocess.run(
        args, cwd=cwd, env=clean, capture_output=True, text=True, timeout=1000, check=False
    )
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sources as they are."""
    directory = tmp_path_factory.mktemp("wheel")
    _call(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--wheel-dir", str(directory), str(ROOT)),
    )
    (path,) = directory.glob("routetrace-*.whl")
    return path


def floors(project: dict[str, Any]) -> list[str]:
    """The oldest release that each declared dependency of [server] admits."""
    declared = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+).*", requirement) for requirement in declared]
    assert all(found), declared
    names = {match[1] for match in found if match}
    assert {"grpcio", "protobuf", "pydantic-settings"} <= names
    return [f"{match[1]}=={match[2]}.*" for match in found if match and match[1] != "tomli"]


def wanted(pair: str) -> tuple[str, str]:
    """Return the requirements of a pair."""
    if pair == "protobuf-4.25" and sys.version_info >= (3, 13):
        pytest.skip("grpcio 1.62 has no wheels for this Python")
    return PAIRS[pair]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A fresh environment."""
    return Environment(tmp_path / "venv")


def test_wheel_holds_all_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(root))
        for root in map(ROOT.joinpath, ("proto", "server", "client", "capture_agent"))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == expected
    assert "routetrace/__init__.py" not in inside
    assert "routetrace/v1/routetrace.proto" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_bare(wheel, environment):
    """`pip install routetrace` gives a trainer and an agent, without torch."""
    environment.install(str(wheel))
    imported, refused = json.loads(environment.run("-c", IMPORT_ALL))
    assert refused.pop("routetrace.codec.kernels") == "llvmlite"  # of the extra `native`
    assert set(refused.values()) <= {"torch", "transformers"}, refused
    assert all(name.startswith(TORCH_ROOMS) for name in refused), sorted(refused)
    assert set(TORCH_FREE) <= set(imported), sorted(refused)
    assert "routetrace.codec.frame" in imported


@pytest.mark.parametrize("age", ["oldest", "newest"])
def test_server(wheel, environment, age):
    """`pip install routetrace[server]` works with the oldest declared versions."""
    if age == "oldest" and sys.version_info >= (3, 12):
        pytest.skip("the oldest numpy has no wheels for this Python")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    limits = floors(pyproject["project"]) if age == "oldest" else []
    environment.install(f"{wheel}[server]", *limits)
    command = str(environment.directory / "bin/routetrace-server")
    assert "--listen" in _call(command, "--help", cwd=environment.directory)
    environment.run("-c", END_TO_END)


def test_command(wheel, environment):
    """`pip install routetrace[cli]` gives the command; without it the command names the extra."""
    environment.install(str(wheel))
    command = str(environment.directory / "bin/routetrace")
    bare = subprocess.run([command, "doctor"], capture_output=True, text=True, check=False)
    assert bare.returncode == 2
    assert "'.[cli]'" in bare.stderr
    assert "Traceback" not in bare.stderr
    environment.install(f"{wheel}[cli]")
    assert _call(command, "--version", cwd=environment.directory).strip()


@pytest.mark.parametrize("pair", PAIRS)
def test_stubs_run_beside(wheel, environment, pair):
    environment.install(str(wheel), *wanted(pair))
    found = environment.run("-W", "error", "-c", ROUND_TRIP).split()
    for requirement, version in zip(wanted(pair), found, strict=True):
        assert requirement.partition("==")[2] in ("", version)
