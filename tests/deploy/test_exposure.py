"""No manifest lets other machines reach a server but through docker/proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from routetrace.server.common.addresses import is_loopback, split_address
from support.composed import ROOT

FOLDER = ROOT / "docker"
RUN = "run.sh"
#: Files of which the second is put over the first.
OVER = {"compose.tls.yaml": "compose.yaml"}


# ---------------------------------------------------------------------------- compose


def put_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A service of one file over that of another, as Compose does it for what counts here."""
    return {**below, **above, "ports": [*below.get("ports", ()), *above.get("ports", ())]}


def services_of(name: str, read: Callable[[Path], str]) -> dict[str, dict[str, Any]]:
    services = yaml.safe_load(read(FOLDER / name))["services"]
    below = services_of(OVER[name], read) if name in OVER else {}
    for key, service in services.items():
        if base := service.get("extends"):
            below[key] = services_of(base["file"], read)[base["service"]]
    over = {key: put_over(below.get(key, {}), service) for key, service in services.items()}
    return {**below, **over}


def mapped(port: str) -> tuple[str, range]:
    """(address of the host, ports of the container) of `[address:][port:]port`."""
    address, _, container = port.rpartition(":")
    host = address.rpartition(":")[0].strip("[]")
    first, _, last = container.partition("-")
    return host, range(int(first), int(last or first) + 1)


def openings_of_compose(services: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What other machines can reach, but for the proxy."""
    for name, service in services.items():
        if service.get("network_mode") == "host":
            yield f"{name} has the network of the machine"
        for port in service.get("ports", ()):
            host, ports = mapped(port)
            if not (host and is_loopback(host)) and not is_proxy_of(service, services, ports):
                yield f"{name} publishes {port}"


def is_proxy_of(service: dict[str, Any], services: dict[str, dict[str, Any]], ports: range) -> bool:
    folders = [v.split(":")[1] for v in service.get("volumes", ()) if v.startswith("./proxy:")]
    environ = service.get("environment", {})
    return (
        service.get("command") == ["sh", f"{''.join(folders)}/{RUN}"]
        and split_address(environ["ROUTETRACE_PROXY_LISTEN"])[1] in ports
        and len(ports) == 1
        and split_address(environ["ROUTETRACE_PROXY_SERVER"])[0] in services
    )


# ---------------------------------------------------------------------------- Kubernetes


def openings_of_kubernetes(objects: list[dict[str, Any]]) -> Iterator[str]:
    """What other machines can reach of pods with a server, but for their proxies."""
    for each in objects:
        if each["kind"] == "Service":
            continue
        template = each["spec"].get("template")
        for container in template["spec"]["containers"] if template else ():
            if container["image"].startswith("routetrace-server"):
                services = [one["spec"] for one in objects if one["kind"] == "Service"]
                yield from openings_of_pod(template, container, services)


def openings_of_pod(
    template: dict[str, Any], server: dict[str, Any], services: list[dict[str, Any]]
) -> Iterator[str]:
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in server["args"])
    host, port = split_address(flags.get("listen", "127.0.0.1:7411"))
    if not is_loopback(host):
        yield f"the server listens on {host}"
    spec = template["spec"]
    if spec.get("hostNetwork"):
        yield "the pod has the network of the node"
    proxied = [
        split_address(environ["ROUTETRACE_PROXY_LISTEN"])[1]
        for sidecar in spec.get("initContainers", ())
        if sidecar.get("restartPolicy") == "Always"
        and sidecar["command"] == ["sh", f"{folder_of_proxy(sidecar, spec)}/{RUN}"]
        and (environ := {one["name"]: one.get("value", "") for one in sidecar["env"]})
        and is_loopback(environ["ROUTETRACE_PROXY_SERVER"].partition(":")[0])
    ]
    for service in services:
        if service["selector"].items() <= template["metadata"]["labels"].items():
            for one in service["ports"]:
                if one["targetPort"] not in proxied:
                    yield f"port {one['port']} leads past the proxy"
    if port not in proxied:
        yield f"no proxy listens at port {port}"


def folder_of_proxy(container: dict[str, Any], spec: dict[str, Any]) -> str:
    names = [
        volume["name"]
        for volume in spec["volumes"]
        if volume.get("configMap", {}).get("name") == "routetrace-proxy"
    ]
    mounts = [m["mountPath"] for m in container["volumeMounts"] if m["name"] in names]
    return "".join(mounts)


# ---------------------------------------------------------------------------- all of them


def openings(name: str, read: Callable[[Path], str] = Path.read_text) -> list[str]:
    """What other machines can reach past the proxy, in one file below docker/."""
    documents = [d for d in yaml.safe_load_all(read(FOLDER / name)) if isinstance(d, dict)]
    if any("services" in document for document in documents):
        return list(openings_of_compose(services_of(name, read)))
    return list(openings_of_kubernetes([d for d in documents if "kind" in d]))


FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.y*ml"))


@pytest.mark.parametrize("name", FILES)
def test_other_machines_reach_no_server_but_through_the_proxy(name: str) -> None:
    assert openings(name) == []


PUBLISHED = '"127.0.0.1:7411:7411"'
SERVICE = "      service: server\n"
SIDECAR = "          restartPolicy: Always\n"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("compose.yaml", PUBLISHED, '"7411:7411"'),
        ("compose.yaml", PUBLISHED, '"0.0.0.0:7411-7413:7411-7413"'),
        ("compose.yaml", PUBLISHED, '"7411"'),
        (
            "compose.vllm.yaml",
            "      service: server\n",
            "      service: server\n    ports: ['7411']\n",
        ),
        ("compose.scale.yaml", "  stop_grace_period: 30s\n", "  network_mode: host\n"),
        ("compose.tls.yaml", "    networks: [inside]\n", "    ports: ['7412:7411']\n"),
        ("compose.tls.yaml", "SERVER: server:7411", "SERVER: elsewhere:7411"),
        ("compose.tls.yaml", f"/{RUN}]", "/other.sh]"),
        ("kubernetes/server.yaml", "--listen=127.0.0.1:7411", "--listen=0.0.0.0:7411"),
        ("kubernetes/server.yaml", "targetPort: 7411", "targetPort: 7412"),
        ("kubernetes/server.yaml", SIDECAR, ""),
        ("kubernetes/object.yaml", "    spec:\n", "    spec:\n      hostNetwork: true\n"),
        ("kubernetes/object.yaml", f"/{RUN}]", "/other.sh]"),
        ("kubernetes/object.yaml", "value: 127.0.0.1  #", "value: elsewhere  #"),
    ],
)
def test_each_way_past_the_proxy_is_seen(name: str, old: str, new: str) -> None:
    assert old in (FOLDER / name).read_text("utf-8")

    def read(path: Path) -> str:
        text = path.read_text("utf-8")
        return text.replace(old, new, 1) if path == FOLDER / name else text

    assert openings(name, read)
