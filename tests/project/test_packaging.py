"""Contents of the wheel: packages, public names, and the stubs beside their proto."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROTO = ROOT / "proto/routetrace/v1/routetrace.proto"
STORED = ROOT / "proto/routetrace/stored/format5.proto"
#: Package -> its directory.
PACKAGES = {
    "routetrace.v1": ROOT / "proto/routetrace/v1",
    "routetrace.stored": ROOT / "proto/routetrace/stored",
    "routetrace.common": ROOT / "proto/routetrace/common",
    "routetrace.codec": ROOT / "proto/routetrace/codec",
    "routetrace.server": ROOT / "server/routetrace/server",
    "routetrace.client": ROOT / "client/routetrace/client",
    "routetrace.cli": ROOT / "client/routetrace/cli",
    "routetrace.page": ROOT / "client/routetrace/page",
    "routetrace.trainers": ROOT / "client/routetrace/trainers",
    "routetrace.simulation": ROOT / "client/routetrace/simulation",
    "routetrace.capture_agent": ROOT / "capture_agent/routetrace/capture_agent",
    "routetrace.experts": ROOT / "capture_agent/routetrace/experts",
}


# ---------------------------------------------------------------------------- packages


def test_roots_are_one_namespace():
    roots = dict.fromkeys(directory.parent for directory in PACKAGES.values())
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [
        str(root.relative_to(ROOT)) for root in roots
    ]
    for root in roots:
        # One __init__.py here would hide the packages of the other roots.
        assert {p for p in root.iterdir() if p.name != "__pycache__"} == {
            directory for directory in PACKAGES.values() if directory.parent == root
        }
    for package, directory in PACKAGES.items():
        assert Path(importlib.import_module(package).__file__ or "").parent == directory


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(package):
    assert (PACKAGES[package] / "py.typed").is_file()


def test_version_is_in_the_changelog():
    headings = re.findall(
        r"^## \[?(\d+\.\d+\.\d+\S*?)\]?(?:\s|$)",
        (ROOT / "CHANGELOG.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert headings[:1] == [PYPROJECT["project"]["version"]]


def test_commands_exist():
    scripts = PYPROJECT["project"]["scripts"]
    assert list(scripts) == ["routetrace", "routetrace-server"]
    for target in scripts.values():
        module, _, name = target.partition(":")
        main = getattr(importlib.import_module(module), name)
        # Called with nothing; what it returns is the exit status.
        inspect.signature(main).bind()


RUNNABLE = {
    "routetrace.cli": "Usage: python -m routetrace.cli [OPTIONS] COMMAND",
    "routetrace.page": "usage: python -m routetrace.page",
    "routetrace.server": "usage: routetrace-server",
    "routetrace.server.command": "usage: routetrace-server",
    "routetrace.capture_agent": "usage: python -m routetrace.capture_agent",
}


@pytest.mark.parametrize("module", RUNNABLE)
def test_packages_run_as_programs(module):
    def said(word: str) -> str:
        command = [sys.executable, "-m", module, word]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert said("--version") == f"{PYPROJECT['project']['version']}\n"
    assert said("--help").startswith(RUNNABLE[module])


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_sdist_has_all_that_tests_read():
    """All but what a package index has no use for."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    tracked = {path.partition("/")[0] for path in listed if path}
    # hatchling adds .gitignore and pyproject.toml by itself.
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    assert tracked - {*included} == {".ci", ".gitignore", "pyproject.toml"}


# ---------------------------------------------------------------------------- names

CLIENT_NAMES = [
    "UNKNOWN_VERSION",
    "AgentHistory",
    "AgentStat",
    "AgentState",
    "Agreement",
    "AgreementChange",
    "AgreementHistory",
    "AsyncPrefetch",
    "AsyncRouteClient",
    "CellRow",
    "ChainMember",
    "ClientConfig",
    "Closed",
    "Corrupt",
    "DeadlineExceeded",
    "EngineRequest",
    "ExpertLoad",
    "Explanation",
    "FetchPlan",
    "FetchStats",
    "FinishReason",
    "Incarnation",
    "Incomplete",
    "InvalidArgument",
    "Limit",
    "Located",
    "Locations",
    "MicroBatch",
    "MissingDependency",
    "MissingRange",
    "MissingReason",
    "ModelLayout",
    "ModelNotSupported",
    "Moved",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "Prefetch",
    "PrefixSpan",
    "Progress",
    "ProvenanceSpan",
    "Rank",
    "ReadFacts",
    "ReadOptions",
    "RefusedCandidate",
    "Retired",
    "RouteClient",
    "RouteTraceError",
    "RowOrigin",
    "Rows",
    "RunHistory",
    "Sample",
    "SampleRows",
    "Security",
    "Segment",
    "ServerInfo",
    "StepAgreement",
    "Trace",
    "TraceChanges",
    "TraceDescription",
    "TraceStat",
    "TraceState",
    "TraceSummary",
    "Unauthenticated",
    "Unavailable",
    "VersionSpan",
    "__version__",
]
AGENT_NAMES = ["AgentConfig", "AgentStats", "CaptureAgent", "CloseReport", "ModelLayout"]


@pytest.mark.parametrize(
    ("package", "names"),
    [("routetrace.client", CLIENT_NAMES), ("routetrace.capture_agent", AGENT_NAMES)],
)
def test_public_names(package, names):
    """A name added here is a promise; one taken away breaks somebody."""
    module = importlib.import_module(package)
    assert module.__all__ == names
    for name in names:
        assert getattr(module, name) is not None


#: Needed on one side of the wire only, or never declared: not to be loaded by a plain import.
HEAVY = (
    "torch",
    "transformers",
    "prometheus_client",
    "typer",
    "pydantic",
    "pythonjsonlogger",
    "msgpack",
)


@pytest.mark.parametrize("package", ["routetrace.client", "routetrace.capture_agent"])
def test_import_is_light(package):
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, {package}; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert package in loaded
    assert not set(HEAVY) & set(loaded)


# ---------------------------------------------------------------------------- stubs


def facts_of_text(text: str) -> set[str]:
    """Every field, value and rpc of a proto file, one sentence each."""
    text = re.sub(r"//[^\n]*", "", text)
    facts: set[str] = set()
    inside: list[str] = []
    for statement, end in re.findall(r"\s*([^;{}]*?)\s*([;{}])", text):
        words = re.findall(r"map\s*<[^>]*>|[\w.\"]+|[=()]", statement)
        if end == "{":
            inside.append(" ".join(words[:2]))
        elif end == "}":
            inside.pop()
        elif not inside:
            if words[0] == "package":
                facts.add(f"package {words[1]}")
        elif words[0] == "rpc":
            signature = " ".join(w for w in words[1:] if w not in "()")
            facts.add(f"{inside[-1]}: rpc {signature}")
        elif words[0] != "option":
            left, _, number = statement.partition("[")[0].rpartition("=")
            left = re.sub(r"\s+", " ", left).strip()
            left = re.sub(r"map\s*<\s*(\w+)\s*,\s*(\w+)\s*>", r"map<\1,\2>", left)
            facts.add(f"{' '.join(inside)}: {left} = {int(number)}")
    assert not inside
    return facts


def facts_of_descriptor(file: descriptor_pb2.FileDescriptorProto) -> set[str]:
    """The same sentences, from what the generated code knows."""
    facts = {f"package {file.package}"}
    for enum in file.enum_type:
        facts |= {f"enum {enum.name}: {v.name} = {v.number}" for v in enum.value}
    for message in file.message_type:
        facts |= {_field_fact(message, field) for field in message.field}
    for service in file.service:
        for rpc in service.method:
            taken = "stream " * rpc.client_streaming + rpc.input_type.rpartition(".")[2]
            given = "stream " * rpc.server_streaming + rpc.output_type.rpartition(".")[2]
            facts.add(f"service {service.name}: rpc {rpc.name} {taken} returns {given}")
    return facts


def _field_fact(
    message: descriptor_pb2.DescriptorProto, field: descriptor_pb2.FieldDescriptorProto
) -> str:
    place = f"message {message.name}"
    if field.HasField("oneof_index") and not field.proto3_optional:
        place += f" oneof {message.oneof_decl[field.oneof_index].name}"
    kind = _type_name(field)
    entry = {m.name: m for m in message.nested_type if m.options.map_entry}.get(kind)
    if entry:
        kind = f"map<{','.join(map(_type_name, entry.field))}>"
    elif field.label == field.LABEL_REPEATED:
        kind = f"repeated {kind}"
    elif field.proto3_optional:
        kind = f"optional {kind}"
    return f"{place}: {kind} {field.name} = {field.number}"


def _type_name(field: descriptor_pb2.FieldDescriptorProto) -> str:
    if field.type_name:
        return field.type_name.rpartition(".")[2]
    return descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def test_stubs_are_those_of_the_proto():
    written = facts_of_text(PROTO.read_text("utf-8"))
    file = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert written == facts_of_descriptor(file)
    assert len(written) > 150
    # Spot checks of what both sides agree on, should they ever agree on nothing.
    assert "message ChunkHeader: bytes ops = 4" in written
    assert "message Hello: map<string,string> attributes = 8" in written
    assert "message IngestRequest oneof message: Chunk chunk = 2" in written
    assert "service TraceService: rpc GetTrace GetTraceRequest returns stream GetTraceResponse" in (
        written
    )


def test_stubs_of_stored_messages_are_those_of_the_proto():
    written = facts_of_text(STORED.read_text("utf-8"))
    file = descriptor_pb2.FileDescriptorProto.FromString(stored.DESCRIPTOR.serialized_pb)
    assert written == facts_of_descriptor(file)
    assert "message Record oneof change: Chunk chunk = 3" in written
    assert "message Source: repeated bytes attempts = 8" in written


def test_every_rpc_has_a_stub_and_a_servicer():
    for service in pb.DESCRIPTOR.services_by_name.values():
        servicer = getattr(pb_grpc, f"{service.name}Servicer")
        assert {name for name in vars(servicer) if not name.startswith("_")} == {
            method.name for method in service.methods
        }
        assert hasattr(pb_grpc, f"{service.name}Stub")
        assert hasattr(pb_grpc, f"add_{service.name}Servicer_to_server")


@pytest.mark.parametrize("proto", [PROTO, STORED], ids=lambda path: path.stem)
def test_every_element_of_the_proto_is_explained(proto):
    lines = proto.read_text("utf-8").splitlines()
    bare = [
        line.strip()
        for before, line in pairwise(lines)
        if re.match(r"\s*(message|enum|service|rpc|oneof|[\w.<>, ]+ = \d+)\b", line)
        and not before.strip().startswith("//")
    ]
    assert not bare


def test_stubs_are_from_the_old_compiler():
    """Newer compilers write a check that refuses the protobuf and grpcio of vLLM's images."""
    directory = PACKAGES["routetrace.v1"]
    for stubs in (directory / "routetrace_pb2.py", STORED.with_name("format5_pb2.py")):
        assert "runtime_version" not in stubs.read_text("utf-8")
    assert "GRPC_GENERATED_VERSION" not in (directory / "routetrace_pb2_grpc.py").read_text("utf-8")


def test_modules_of_the_contract_do_not_know_the_sides():
    """routetrace.v1 is imported by all three; it imports none of them."""
    for module in pkgutil.iter_modules([str(PACKAGES["routetrace.v1"])]):
        text = (PACKAGES["routetrace.v1"] / f"{module.name}.py").read_text("utf-8")
        assert not re.search(r"routetrace\.(server|client|capture_agent)\b", text), module.name
