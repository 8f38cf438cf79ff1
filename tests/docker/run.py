"""Builds the images; runs docker/compose.yaml for real, then compose.tls.yaml: `make test-docker`.

With Docker where an engine answers; else with podman and buildah, in namespaces of their own, on a
stand-in for the base image (standin.py). Says what was run and what was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import standin

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker/compose.yaml"
COMPOSE_TLS = ROOT / "docker/compose.tls.yaml"
DASHBOARD = ROOT / "docker/grafana/dashboards/routetrace.json"
#: Queries that need not have data: of events that this run does not cause, and of agents, which
#: have ended when Prometheus looks.
MAY_BE_EMPTY = {
    "Bytes by run: {{run}} quota",
    "Certificate ends in: ",
    "Chunks: refused: {{kind}}",
    "Connected, lost and fenced: fenced: {{run}}",
    "Connected, lost and fenced: restarted: {{run}}",
    "Forgotten: traces: {{reason}}",
    "Memory: limit",
    "Missing cells by reason: {{reason}}",
    "Refused: credentials: {{reason}}",
    "Refused: room: {{what}}",
    "Weight version lag: {{run}} {{engine_id}}",
}
PROJECT = "routetrace-test"
PROMETHEUS = "http://127.0.0.1:9090"
GRAFANA = "http://127.0.0.1:3000"
_READ_ALL = """
import hashlib, json
from routetrace.client import RouteClient
with RouteClient("127.0.0.1:7411", run="compose") as client:
    ids = sorted(stat.trace_id for stat in client.find())
    rows = {trace.trace_id: trace.topk_ids.tobytes() for trace in client.get_many(ids)}
print(json.dumps({name: hashlib.sha256(ids).hexdigest() for name, ids in rows.items()}))
"""
_REACH = """
import socket
try:
    socket.create_connection(("server", 7411), 10)
except OSError as error:
    print(type(error).__name__)
"""
_BEGUN = time.monotonic()


class Failed(Exception):
    """Something is not as it must be."""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if sys.argv[1:2] == ["--inside"]:
        return _guarded(lambda: prove(Podman()))
    if _docker_answers():
        return _guarded(_with_docker)
    if "--where-possible" in sys.argv and (why := standin.impossible()):
        print(f"NOT RUN, none of it: {why}", flush=True)
        return 0
    return _guarded(_with_podman)


def _guarded(work: Callable[[], int]) -> int:
    try:
        return work()
    except (Failed, standin.Unable) as error:
        print(f"FAILED: {error}", flush=True)
        return 1


def _docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return all(
        subprocess.run(["docker", *words], capture_output=True, check=False).returncode == 0
        for words in (["info"], ["compose", "version"])
    )


def _with_docker() -> int:
    engine = Docker()
    try:
        say("Docker builds the images")
        engine.compose("build", "server", "inference")
        return prove(engine)
    finally:
        engine.compose("down", "--volumes", "--timeout", "5")


def _with_podman() -> int:
    say("no Docker engine with compose answers; podman and buildah stand in")
    work = Path(tempfile.mkdtemp(prefix="routetrace-docker-"))
    try:
        environ = standin.prepare(work)
        say(f"stand-in base image made of Debian packages: {standin.BASE_IMAGE}")
        arguments = f"--podman-build-args={standin.build_arguments(work)}"
        for service in ("server", "inference"):
            words = ["podman-compose", "-p", PROJECT, "-f", str(COMPOSE), arguments]
            standin.call(*words, "build", service, env=environ)
            say(f"image of {service} built from docker/Dockerfile")
        code = standin.inside([sys.executable, __file__, "--inside"], environ)
    finally:
        left = standin.clear(work)
        say(f"LEFT BEHIND: {'; '.join(left)}" if left else "no process, mount or file is left")
    return 1 if left else code


# ---------------------------------------------------------------------------- engines


class Engine:
    """Runs the compose file."""

    program = ""
    words: tuple[str, ...] = ()
    pulls = True
    files = (COMPOSE,)

    def compose(self, *words: str) -> str:
        files = [word for file in self.files for word in ("-f", str(file))]
        return standin.call(*self.words, "-p", PROJECT, *files, *words)

    def call(self, *words: str) -> str:
        return standin.call(self.program, *words)

    def container(self, service: str) -> str:
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={PROJECT}"
        (name,) = self.call("ps", "-aq", "--filter", label, "--filter", project).split()
        return name

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(self.call("inspect", self.container(service)))[0]

    def execute(self, service: str, *words: str) -> str:
        return self.call("exec", self.container(service), *words)

    def health(self, service: str) -> str:
        return str(self.inspect(service)["State"]["Health"]["Status"])


class Docker(Engine):
    """The real one."""

    program = "docker"
    words = ("docker", "compose")


class Podman(Engine):
    """The stand-in: no registry, and no timers that would run health checks."""

    program = "podman"
    words = ("podman-compose",)
    pulls = False

    def health(self, service: str) -> str:
        subprocess.run(
            ["podman", "healthcheck", "run", self.container(service)],
            capture_output=True,
            check=False,
        )
        return super().health(service)


# ---------------------------------------------------------------------------- what is shown


def prove(engine: Engine) -> int:
    watchers = ["prometheus", "grafana"] if engine.pulls else ["prometheus"]
    engine.compose("up", "-d", "server", *watchers)
    _healthy(engine, "server")
    _hardened(engine, "server")
    _trained(engine)
    before = _content(engine)
    expect(len(before) == 16, "16 traces, which `routetrace verify --all` finds right", before)

    _watched(engine)
    _restarted(engine, before)
    if engine.pulls:
        found = json.load(urllib.request.urlopen(f"{GRAFANA}/api/dashboards/uid/routetrace"))
        expect(found["meta"]["provisioned"], "Grafana has the dashboard", found)
    else:
        say(
            "NOT RUN: Grafana, whose image cannot be had here; "
            "tests/deploy/test_docker.py reads its JSON"
        )
        say(f"STOOD IN: {engine.execute('prometheus', 'prometheus', '--version').splitlines()[0]}")
    engine.compose("down", "--volumes")
    _proxied(engine)
    return 0


def _healthy(engine: Engine, service: str) -> None:
    until(f"the {service} is healthy", lambda: engine.health(service) == "healthy")


def _trained(engine: Engine) -> None:
    said = engine.compose("run", "--rm", "-T", "--no-deps", "inference")
    expect("rows dropped {}, unsent 0" in said, "the inference node's rows are stored", said)
    said = engine.compose("run", "--rm", "-T", "--no-deps", "trainer")
    expect("coverage 100.0%" in said, "the trainer got every row of them", said)


def _proxied(engine: Engine) -> None:
    """With TLS and tokens, all calls go through the proxy."""
    engine.files = (COMPOSE, COMPOSE_TLS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SECRETS"] = folder
        _make_secrets(engine, Path(folder))
        for service in ("server", "proxy"):
            engine.compose("up", "-d", "--no-deps", service)
            _healthy(engine, service)
        say(f"HAProxy: {engine.execute('proxy', 'haproxy', '-v').splitlines()[0]}")
        _hardened(engine, "proxy")
        _trained(engine)
        context = ssl.create_default_context(cafile=f"{folder}/ca.pem")
        with (
            socket.create_connection(("127.0.0.1", 7443), 10) as raw,
            context.wrap_socket(raw, server_hostname="server"),
        ):
            say("the proxy is reached from outside, with the certificate of the server")
        found = engine.compose(
            *("run", "--rm", "-T", "--no-deps", "--entrypoint", "python", "inference", "-c"), _REACH
        )
        expect("gaierror" in found, "a node that knows the proxy does not find the server", found)
        engine.compose("down", "--volumes")


def _make_secrets(engine: Engine, folder: Path) -> None:
    def certify(name: str, *words: str) -> None:
        standin.call(
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{folder}/{name}.key"),
            *("-out", f"{folder}/{name}.pem", *words),
        )

    certify("ca")
    signed = ("-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key")
    names = ("-addext", "subjectAltName=DNS:server", "-addext", "basicConstraints=CA:false")
    certify("server", *signed, *names)
    entries = []
    for name, scope in (("node", "ingest"), ("trainer", "read")):
        token = secrets.token_urlsafe(32)
        (folder / f"{name}.token").write_text(token)
        digest = hashlib.sha256(token.encode()).hexdigest()
        entries += ["[[token]]", f'name = "{name}"', f'sha256 = "{digest}"']
        entries += [f'scopes = ["{scope}"]', 'runs = ["compose"]']
    (folder / "tokens.toml").write_text("\n".join(entries))
    folder.chmod(0o755)
    # To the user of the images, who alone may read a key.
    engine.call(
        *("run", "--rm", "--user=0", "--entrypoint=sh", f"--volume={folder}:/secrets"),
        *("routetrace-server", "-c", "chown 10001:10001 /secrets/*"),
    )


def _hardened(engine: Engine, service: str) -> None:
    user = engine.execute(service, "id", "-u").strip()
    expect(user == "10001", f"the {service} is not root", user)
    expect(engine.inspect(service)["HostConfig"]["ReadonlyRootfs"], "its root is read-only", "")
    wrote = subprocess.run(
        [engine.program, "exec", engine.container(service), "touch", "/opt/x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    expect(wrote.returncode != 0 and "Read-only" in wrote.stderr, "nothing can be written", wrote)


def _content(engine: Engine) -> dict[str, str]:
    """Return a digest of each trace's rows, as a reader gets them, by trace id."""
    engine.execute("server", "routetrace", "verify", "--all", "--run", "compose")
    return json.loads(engine.execute("server", "python", "-c", _READ_ALL))


def _watched(engine: Engine) -> None:
    until(
        "Prometheus has scraped the rows that were stored",
        lambda: any(float(v) > 0 for v in query("routetrace_ingest_rows_total")),
    )
    checked = engine.execute(
        "prometheus", "promtool", "check", "config", "/etc/prometheus/prometheus.yaml"
    )
    say(" ".join(re.findall(r"SUCCESS: .*", checked)))
    rules = [rule for group in ask("/api/v1/rules")["data"]["groups"] for rule in group["rules"]]
    until(
        f"all {len(rules)} alerts were evaluated",
        lambda: all(
            rule["health"] == "ok"
            for group in ask("/api/v1/rules")["data"]["groups"]
            for rule in group["rules"]
        ),
    )
    # An alert of the start ends with the next evaluation.
    until(
        "none of them fires",
        lambda: not _firing(),
        failed=lambda: f"firing: {', '.join(_firing())}",
    )
    # Rates need two scrapes, and completeness a count of the store's traces.
    until(
        "every query of the dashboard that needs data has some",
        lambda: not _silent() - MAY_BE_EMPTY,
        failed=lambda: f"no data: {', '.join(sorted(_silent() - MAY_BE_EMPTY))}",
    )
    say(f"queries without data: {', '.join(sorted(_silent()))}")


def _firing() -> list[str]:
    """Return the names of the alerts that fire; one that is pending does not."""
    alerts = ask("/api/v1/alerts")["data"]["alerts"]
    return [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]


def _silent() -> set[str]:
    """Return the dashboard's queries that have no data."""
    silent = set()
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            # Grafana fills these in.
            text = re.sub(r"\$(instance|run)", ".*", target["expr"])
            if not query(text.replace("$__rate_interval", "1m")):
                silent.add(f"{panel['title']}: {target['legendFormat']}")
    return silent


def _restarted(engine: Engine, before: dict[str, str]) -> None:
    begun = time.monotonic()
    engine.call("stop", "--time", "30", engine.container("server"))
    state = engine.inspect("server")["State"]
    expect(state["ExitCode"] == 0, f"SIGTERM: exit 0 in {time.monotonic() - begun:.1f} s", state)
    engine.call("start", engine.container("server"))
    until("the server is healthy again", lambda: engine.health("server") == "healthy")
    expect(_content(engine) == before, "every row is served as before", "")


def query(text: str) -> list[str]:
    """Values that Prometheus answers an expression with."""
    answer = ask("/api/v1/query?" + urllib.parse.urlencode({"query": text}))
    return [sample["value"][1] for sample in answer["data"]["result"]]


def ask(path: str) -> Any:
    """Return Prometheus' answer; raise our own error otherwise."""
    try:
        with urllib.request.urlopen(PROMETHEUS + path, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Failed(f"{path}: {error.read().decode()}") from error


def until(
    what: str,
    holds: Callable[[], bool],
    timeout: float = 90,
    failed: Callable[[], str] = lambda: "",
) -> None:
    """Wait for something outside of this process; `failed` describes its state at the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if holds():
                break
        except (OSError, standin.Unable) as error:
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not within {timeout:g} s: {error}") from error
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {timeout:g} s; {failed()}".rstrip("; "))
        time.sleep(0.5)
    say(what)


def expect(holds: object, what: str, found: object) -> None:
    """Say what holds, or fail with what was found in its place."""
    if not holds:
        raise Failed(f"expected that {what}; found: {found}")
    say(what)


def say(what: str) -> None:
    """A line of the report, with the time since the start."""
    begun = float(os.environ.setdefault("ROUTETRACE_TEST_BEGUN", str(_BEGUN)))
    print(f"{time.monotonic() - begun:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
