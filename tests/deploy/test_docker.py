"""The image and compose files: valid, and every file, target, command and flag in them exists.

No container runs here; the files are read, and their commands are given to the code they are for.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import yaml

from routetrace.client import RouteClient
from routetrace.server.common.addresses import split_address
from routetrace.server.settings.loading import load_config
from routetrace.server.testing import free_ports, run_server
from support.composed import (
    COMPOSE,
    COMPOSE_TLS,
    ROOT,
    SERVICES,
    SPEC,
    STAGES,
    compose_config,
    stage_of,
)
from support.proxied import HAPROXY, Proxy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMPOSE_VLLM = ROOT / "docker/compose.vllm.yaml"
COMPOSE_SGLANG = ROOT / "docker/compose.sglang.yaml"
COMPOSE_SCALE = ROOT / "docker/compose.scale.yaml"
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


# ---------------------------------------------------------------------------- reading


BUILT = ("server", "inference", "trainer")


def volume_of(service: str) -> tuple[str, str]:
    """(name, path in the container) of the service's only volume."""
    (volume,) = SERVICES[service]["volumes"]
    name, _, path = volume.partition(":")
    return name, path


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", duration).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


# ---------------------------------------------------------------------------- compose


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    """Check a file against the published schema of the Compose Specification."""
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "path",
    [COMPOSE, COMPOSE_TLS, COMPOSE_VLLM, COMPOSE_SGLANG, COMPOSE_SCALE],
    ids=lambda path: path.name,
)
def test_compose_file_fits_the_specification(path):
    done = check_schema(path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("healthcheck:", "healthchek:"),
        ("condition: service_healthy", "condition: healthy"),
        ("read_only: true", "read_only: [very]"),
    ],
)
def test_validator_refuses_mistakes(tmp_path, old, new):
    text = COMPOSE.read_text("utf-8")
    assert old in text
    broken = tmp_path / "compose.yaml"
    broken.write_text(text.replace(old, new), "utf-8")
    done = check_schema(broken)
    assert done.returncode == 1, done.stdout + done.stderr


def has_compose() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    done = subprocess.run([docker, "compose", "version"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not has_compose(), reason="no docker compose; the schema check stands alone")
def test_docker_compose_takes_the_file():
    subprocess.run(["docker", "compose", "-f", COMPOSE, "config", "--quiet"], check=True)


def test_compose_names_exist():
    assert set(SERVICES) == {*BUILT, "prometheus", "grafana"}
    volumes = [v.split(":")[0] for s in SERVICES.values() for v in s["volumes"]]
    assert {name for name in volumes if "/" not in name} == set(SPEC["volumes"])
    for path in volumes:
        assert "/" not in path or (COMPOSE.parent / path).is_dir()
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for name in BUILT:
        service = SERVICES[name]
        build = service["build"]
        assert (COMPOSE.parent / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert build["target"] in STAGES, name
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other] or stage_of(other).value("HEALTHCHECK")
    # Images of one name are built from one target.
    images = {(SERVICES[s]["image"], SERVICES[s]["build"]["target"]) for s in BUILT}
    assert len(images) == len({image for image, _ in images}) == 2


# ---------------------------------------------------------------------------- server


def test_server_flags_are_taken(server_environment):
    config = compose_config()
    assert config.host_port == ("0.0.0.0", 7411)
    assert config.insecure
    # What is stored lies in the volume, whatever flags are given, and outlives the container.
    path = PurePosixPath(volume_of("server")[1])
    assert PurePosixPath(config.data_dir) == path
    assert PurePosixPath(load_config([]).data_dir) == path
    assert stage_of("server").value("VOLUME") == str(path)
    assert config.store == "disk"


def test_server_is_reached_where_it_listens(server_environment):
    _, port = compose_config().host_port
    _, metrics_port = split_address(compose_config().metrics_listen)
    _, page_port = split_address(compose_config().page_listen)
    assert stage_of("server").value("EXPOSE") == f"{page_port} {port} {metrics_port}"
    assert SERVICES["server"]["ports"] == [
        f"127.0.0.1:{number}:{number}" for number in (page_port, port)
    ]
    for service in ("inference", "trainer"):
        assert SERVICES[service]["environment"]["ROUTETRACE_TARGET"] == f"server:{port}"
    assert SERVICES["server"]["healthcheck"]["test"] == ["CMD", *health_command()]
    assert health_command()[-1] == f"127.0.0.1:{port}"


def test_server_has_time_to_stop(server_environment):
    grace = seconds(SERVICES["server"]["stop_grace_period"])
    assert grace >= compose_config().drain_seconds + 10


def health_command() -> list[str]:
    options, _, command = stage_of("server").value("HEALTHCHECK").partition(" CMD ")
    assert all(re.fullmatch(r"--[a-z-]+=\w+", option) for option in options.split())
    return json.loads(command)


PROGRAM = str(Path(sys.executable).with_name("routetrace-server"))


@pytest.mark.slow
def test_health_command_tells_a_server_from_none(server_environment):
    """The image's own check, pointed at a real server, and then at where it was."""
    command, port = health_command(), f":{compose_config().host_port[1]}"
    assert command[0] == "routetrace-server"

    def check(target: str) -> int:
        words = [target if word.endswith(port) else word for word in command[1:]]
        done = subprocess.run([PROGRAM, *words], capture_output=True, timeout=30, check=False)
        return done.returncode

    with run_server() as server:
        target = server.target
        assert check(target) == 0
    assert check(target) == 1


# ---------------------------------------------------------------------------- workers


@pytest.mark.parametrize("service", ["inference", "trainer"])
def test_worker_command_exists(service):
    stage = stage_of(service)
    assert stage.argv("ENTRYPOINT") == ["python"]
    script, rollouts = SERVICES[service]["command"]
    # The script lies where the working directory and COPY say.
    source, target = stage.value("COPY").split()
    assert PurePosixPath(script).parts[0] == target == source
    assert PurePosixPath(stage.value("WORKDIR")).is_absolute()
    assert (ROOT / script).is_file()
    # What one writes and the other reads lies in the volume that they share.
    assert PurePosixPath(rollouts).parent == PurePosixPath(volume_of(service)[1])
    assert volume_of(service)[1] == stage.value("VOLUME")


def test_workers_share_rollouts():
    assert SERVICES["inference"]["command"][1:] == SERVICES["trainer"]["command"][1:]
    assert volume_of("inference") == volume_of("trainer")


def test_workers_run_as_composed(tmp_path, monkeypatch, capsys):
    """Both commands, one after the other, with their own environment, against a real server."""
    import torch

    monkeypatch.syspath_prepend(ROOT / "examples")
    # Threads of one small model that wait for each other cost more than they save.
    torch.set_num_threads(1)

    def run(service: str, *more: str) -> list[str]:
        for name, value in SERVICES[service]["environment"].items():
            monkeypatch.setenv(name, value.replace("server:7411", server.target))
        script, rollouts = SERVICES[service]["command"]
        monkeypatch.setattr(sys, "argv", [script, str(tmp_path / Path(rollouts).name), *more])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        assert end.value.code == 0, lines
        return lines

    with run_server() as server:
        said = run("inference", "--groups=2", "--samples=2", "--tokens=8", "--batch=1")
        assert "rows dropped {}, unsent 0" in said
        said = run("trainer")
        assert "4 samples, of which the server knows 4" in said
        assert "coverage 100.0%" in said
        # Another run's traces are not seen: the variable counts.
        with RouteClient(server.target, run="another") as client:
            assert not list(client.find())


# ---------------------------------------------------------------------------- TLS


def test_the_proxy_as_composed():
    spec = yaml.safe_load(COMPOSE_TLS.read_text("utf-8"))
    services = spec["services"]
    proxy = services["proxy"]
    assert (proxy["cap_drop"], proxy["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert proxy["read_only"]
    assert proxy["user"] == stage_of("server").value("USER")
    (folder,) = proxy["volumes"]
    source, inside, mode = folder.split(":")
    assert (COMPOSE.parent / source / Path(proxy["command"][1]).relative_to(inside)).is_file()
    assert mode == "ro"
    # The server is where the proxy and Prometheus alone reach it.
    assert services["server"]["networks"] == ["inside"]
    reach = {name for name, s in services.items() if "inside" in s.get("networks", ())}
    assert reach == {"server", "proxy", "prometheus"}
    assert set(spec["networks"]) == {"default", "inside"}
    host, port = split_address(proxy["environment"]["ROUTETRACE_PROXY_SERVER"])
    flags = services[host]["command"]
    assert f"--listen=0.0.0.0:{port}" in flags
    _, own = split_address(proxy["environment"]["ROUTETRACE_PROXY_LISTEN"])
    assert proxy["ports"] == [f"{own}:{own}"]
    assert str(own) in proxy["healthcheck"]["test"][-1]
    for name in ("inference", "trainer"):
        assert services[name]["environment"]["ROUTETRACE_TARGET"] == f"proxy:{own}"
        assert services[name]["depends_on"] == {"proxy": {"condition": "service_healthy"}}


@pytest.mark.parametrize(
    "proxied",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not HAPROXY, reason="haproxy is missing")),
    ],
)
def test_tls_and_tokens_as_composed(tmp_path, monkeypatch, server_environment, proxied):
    """The flags and variables of compose.tls.yaml, with files where its secrets would be."""
    import numpy as np
    import trustme

    from routetrace.capture_agent import AgentConfig, CaptureAgent
    from routetrace.common.errors import PermissionDenied, Unauthenticated
    from routetrace.common.layout import ModelLayout
    from routetrace.server.daemon import main as server_main

    spec = yaml.safe_load(COMPOSE_TLS.read_text("utf-8"))
    services, there = spec["services"], "/run/secrets"
    assert set(services) == {*BUILT, "proxy", "prometheus"}
    for name, secret in spec["secrets"].items():
        assert secret["file"].endswith(f"/{name}")
    text = json.dumps(services)
    renamed = {"server.crt": "server.pem"}
    names = set(re.findall(rf"{there}/([\w.]+)", text))
    assert {renamed.get(name, name) for name in names} == set(spec["secrets"])
    [as_crt, *others] = services["proxy"]["secrets"]
    # HAProxy takes the key from a .key of the same name.
    assert (as_crt, others[0]) == (
        {"source": renamed["server.crt"], "target": "server.crt"},
        "server.key",
    )

    authority = trustme.CA()
    issued = authority.issue_cert("server")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    (tmp_path / "server.key").touch(0o600)
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    with (tmp_path / "tokens.toml").open("w") as tokens, redirect_stdout(tokens):
        for name, scope in (("node", "ingest"), ("trainer", "read")):
            out = f"--out={tmp_path}/{name}.token"
            words = ["token", f"--name={name}", f"--scope={scope}", "--run=compose", out]
            assert server_main(words) == 0

    def enter(service: str) -> None:
        for name in ("CA_FILE", "SERVER_NAME", "TOKEN_FILE"):
            monkeypatch.delenv(f"ROUTETRACE_{name}", raising=False)
        assert {f"{there}/{secret}" for secret in services[service]["secrets"]} == set(
            re.findall(rf"{there}/[\w.]+", json.dumps(services[service]))
        )
        for name, value in services[service]["environment"].items():
            monkeypatch.setenv(name, value.replace(there, str(tmp_path)))
        # There is no name `server` here.
        monkeypatch.setenv("ROUTETRACE_SERVER_NAME", "server")

    flags = [word.replace(there, str(tmp_path)) for word in services["server"]["command"]]
    enter("server")
    config = load_config(flags)
    assert not config.insecure
    settings = config.model_dump(include={"tls_cert", "tls_key", "tokens_file"})
    with ExitStack() as parts:
        server = parts.enter_context(run_server(data_dir=tmp_path / "data", **settings))
        target = server.target
        if proxied:
            target = f"127.0.0.1:{free_ports(1)}"
            files = services["proxy"]["environment"]
            pem, ca_file = (Path(files[f"ROUTETRACE_PROXY_{name}"]).name for name in ("PEM", "CA"))
            shutil.copy(tmp_path / renamed[pem], tmp_path / pem)
            log = tmp_path / "proxy.log"
            parts.enter_context(
                Proxy(target, server.target, tmp_path / pem, tmp_path / ca_file, log)
            )
        check = [PROGRAM, *health_command()[1:-1], target]
        assert subprocess.run(check, capture_output=True, timeout=30, check=False).returncode == 0
        enter("inference")
        layout = ModelLayout((0,), 1, 4, 2)
        ids = np.array([[[0, 1]]] * 5, np.uint8)
        with CaptureAgent(AgentConfig(target, "e", layout, run="compose")) as agent:
            handle = agent.begin("r")
            agent.step(ids, np.array([[handle, 0, 5]]))
            agent.finish(handle, 6, reason="stop")
            assert agent.flush(30)
        client = RouteClient(target, run="compose")
        with client, pytest.raises(PermissionDenied):
            client.get("r")
        enter("trainer")
        with RouteClient(target, run="compose") as client:
            np.testing.assert_array_equal(client.get("r", wait_for="end", timeout=20).topk_ids, ids)
        enter("server")
        client = RouteClient(target, run="compose")
        with client, pytest.raises(Unauthenticated):
            client.get("r")


# ---------------------------------------------------------------------------- vLLM


def test_three_servers_share_an_object_store(server_environment, monkeypatch):
    services = yaml.safe_load(COMPOSE_SCALE.read_text("utf-8"))["services"]
    names = ["server-a", "server-b", "server-c"]
    assert [name for name in services if name.startswith("server")] == names
    for name in names:
        environ = services[name]["environment"]
        monkeypatch.setenv("ROUTETRACE_ADVERTISE", environ.pop("ROUTETRACE_ADVERTISE"))
        config = load_config(services[name]["command"])
        assert services[name] == services["server-a"]
        # The text of the targets, by which agents and clients know the host.
        assert config.advertised == f"{name}:{config.host_port[1]}"
        assert services["inference"]["depends_on"][name] == {"condition": "service_healthy"}
    assert (config.store, config.object_url, config.workers) == (
        "object",
        "s3://routetrace/runs",
        len(names),
    )
    # Workers have sockets in the directory for temporary files.
    assert services["server-a"]["read_only"]
    assert services["server-a"]["tmpfs"] == ["/tmp"]
    _, _, endpoint = config.object_endpoint.rpartition("/")
    host, port = split_address(endpoint)
    assert f"-s3.port={port}" in services[host]["command"]
    assert f"-ip={host}" in services[host]["command"]
    keys = {name: services["server-a"]["environment"][name] for name in AWS_KEYS}
    assert all(services[host]["environment"][name] == key for name, key in keys.items())
    targets = services["inference"]["environment"]["ROUTETRACE_TARGET"].split(",")
    assert targets == [f"{name}:{config.host_port[1]}" for name in names]


def test_vllm_worker_asks_for_the_connector(monkeypatch):
    """Its command makes the settings that the connector takes, and reaches the server."""
    from routetrace.capture_agent.engines.vllm.settings import settings_of

    services = yaml.safe_load(COMPOSE_VLLM.read_text("utf-8"))["services"]
    assert set(services) == {"server", "vllm"}
    base = services["server"]["extends"]
    assert (COMPOSE_VLLM.parent / base["file"], base["service"]) == (COMPOSE, "server")
    worker = services["vllm"]
    assert worker["build"]["target"] in STAGES
    for name, value in worker["environment"].items():
        if name.startswith("ROUTETRACE_"):
            monkeypatch.setenv(name, value)
    config = json.loads(worker["command"][worker["command"].index("--kv-transfer-config") + 1])
    parallel = SimpleNamespace(data_parallel_index=0, data_parallel_size=1)
    settings = settings_of(
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(**config),
            additional_config={},
            instance_id="boot",
            parallel_config=parallel,
        )
    )
    assert (settings.way, settings.run, settings.engine_id) == ("connector", "compose", "rollout-0")
    assert (
        os.environ["ROUTETRACE_TARGET"] == SERVICES["inference"]["environment"]["ROUTETRACE_TARGET"]
    )
    module = importlib.util.find_spec(config["kv_connector_module_path"])
    assert module is not None


# ---------------------------------------------------------------------------- SGLang


def test_sglang_worker_turns_capture_on():
    """Its environment makes the settings that the plugin takes, and reaches the server."""
    from routetrace.capture_agent.engines.sglang.settings import settings_of

    services = yaml.safe_load(COMPOSE_SGLANG.read_text("utf-8"))["services"]
    assert set(services) == {"server", "sglang"}
    base = services["server"]["extends"]
    assert (COMPOSE_SGLANG.parent / base["file"], base["service"]) == (COMPOSE, "server")
    worker = services["sglang"]
    assert worker["build"]["target"] in STAGES
    environ = worker["environment"]
    settings = settings_of(environ)
    assert settings is not None
    assert (settings.engine_id, settings.agent) == ("rollout-0", {})
    for name in ("ROUTETRACE_TARGET", "ROUTETRACE_RUN"):
        assert environ[name] == SERVICES["inference"]["environment"][name]
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert plugins["entry-points"]["sglang.srt.plugins"], "SGLang loads it without a flag"


# ---------------------------------------------------------------------------- images


@pytest.mark.parametrize("target", ["server", "worker"])
def test_image_is_well_behaved(target):
    stage = STAGES[target]
    user = re.fullmatch(r"(\d+):(\d+)", stage.value("USER"))
    assert user is not None
    assert "0" not in user.groups()
    assert stage.value("STOPSIGNAL") == "SIGTERM"
    assert stage.argv("ENTRYPOINT")
    # A volume is written by the user, so its directory must be there and be theirs.
    owned = f"install -d -o {user[1]} -g {user[2]} {stage.value('VOLUME')}"
    assert owned in stage.values("RUN")
    # Nothing is built in the image that is shipped.
    assert not [run for run in stage.values("RUN") if "pip" in run]


@pytest.mark.parametrize("target", ["server", "worker"])
def test_image_is_labelled(target):
    labels = STAGES[target].pairs("LABEL")
    prefix = "org.opencontainers.image."
    assert labels[prefix + "title"] == f"routetrace-{target}"
    assert labels[prefix + "description"]
    assert labels[prefix + "licenses"] == PROJECT["license"]
    assert labels[prefix + "version"] == "${VERSION}"
    assert STAGES["base"].value("ARG") == f"VERSION={PROJECT['version']}"


def test_commands_of_the_image_are_installed():
    for name in {stage_of("server").argv("ENTRYPOINT")[0], health_command()[0]}:
        module, _, function = PROJECT["scripts"][name].partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_extras_exist():
    runs = [run for stage in STAGES.values() for run in stage.values("RUN")]
    named = {names for run in runs for names in re.findall(r"routetrace\[([\w,]+)\]", run)}
    extras = {extra for names in named for extra in names.split(",")}
    assert extras == {"server", "scale", "cli", "page", "agent"}
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_stages_exist():
    for stage in STAGES.values():
        assert stage.base in STAGES or stage.base in {
            "${PYTHON_IMAGE}",
            "${VLLM_IMAGE}",
            "${SGLANG_IMAGE}",
        }
        for copy in stage.values("COPY"):
            for other in re.findall(r"--from=(\S+)", copy):
                assert other in STAGES, copy


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out of the build."""
    out = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = PurePosixPath(path).parts
        heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        tail = pattern.removeprefix("**/")
        names = parts if tail != pattern else heads
        if any(fnmatch.fnmatchcase(name, tail) for name in names):
            out = not line.startswith("!")
    return out


def test_build_sees_what_it_copies_and_no_more():
    copied = {
        source
        for stage in STAGES.values()
        for copy in stage.values("COPY")
        if "--from" not in copy
        for source in copy.split()[:-1]
    }
    assert {"pyproject.toml", "examples"} <= copied
    for source in copied:
        assert (ROOT / source).exists()
        assert not ignored(source), source
    # Everything that the wheel is made of is copied.
    assert {"proto", "server", "client", "capture_agent"} <= copied
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied
    for secret in (".git/config", ".venv/bin/python", "tests/deploy/test_docker.py", ".env"):
        assert ignored(secret), secret
    assert ignored("proto/routetrace/v1/__pycache__/layout.cpython-311.pyc")
    assert not ignored("proto/routetrace/v1/routetrace.proto")
