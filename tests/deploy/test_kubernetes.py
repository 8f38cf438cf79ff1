"""The manifests for Kubernetes: flags, ports, files, users and labels fit each other and the image.

`make test-kubernetes` checks them against the schemas of Kubernetes.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from routetrace.server.common.addresses import split_address
from routetrace.server.settings.loading import load_config
from support.composed import COMPOSE_TLS, STAGES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker/kubernetes"
NAMES = ("server", "object")
SECRETS = {"tls": ("tls.crt", "tls.key", "ca.crt"), "tokens": ("tokens.toml",)}


class Manifest:
    """The objects of one file."""

    def __init__(self, name: str) -> None:
        self.objects = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text("utf-8")))
        self.set = self.one("StatefulSet")
        self.pod = self.set["spec"]["template"]
        (self.container,) = self.pod["spec"]["containers"]
        (self.proxy,) = self.pod["spec"]["initContainers"]
        self.mounts = mounts_of(self.container)

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = (each for each in self.objects if each["kind"] == kind)
        return found

    @property
    def flags(self) -> dict[str, str]:
        return dict(word.removeprefix("--").split("=", 1) for word in self.container["args"])

    @property
    def claims(self) -> dict[str, str]:
        """Size by name of each volume that outlives its pod."""
        return {
            claim["metadata"]["name"]: claim["spec"]["resources"]["requests"]["storage"]
            for claim in self.set["spec"].get("volumeClaimTemplates", ())
        }


def mounts_of(container: dict[str, Any]) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.fixture(params=NAMES)
def manifest(request: pytest.FixtureRequest) -> Manifest:
    return Manifest(request.param)


def gib(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Gi|GiB)", size).groups()
    assert unit
    return int(number)


def config_of(manifest: Manifest, tmp_path: Path) -> Any:
    """Settings of the server, with its Secrets where the flags say, below a directory."""
    args = list(manifest.container["args"])
    for volume, files in SECRETS.items():
        mounted = manifest.mounts[volume]
        (tmp_path / volume).mkdir()
        for file in files:
            (tmp_path / volume / file).write_text("")
        assert any(mounted in word for word in args)
        args = [word.replace(mounted, str(tmp_path / volume)) for word in args]
    assert not [word for word in args if "/etc/" in word]
    return load_config(args)


def test_the_server_takes_its_flags(manifest, tmp_path):
    config = config_of(manifest, tmp_path)
    assert not config.insecure
    assert (config.tls_cert, config.tls_key, config.tokens_file) != (None, None, None)
    (metrics,) = manifest.container["ports"]
    assert metrics["containerPort"] == split_address(config.metrics_listen)[1]
    (grpc,) = manifest.proxy["ports"]
    assert manifest.pod["spec"]["terminationGracePeriodSeconds"] >= config.drain_seconds + 10
    (service,) = manifest.one("Service")["spec"]["ports"]
    assert service["port"] == service["targetPort"] == grpc["containerPort"] == config.host_port[1]
    annotations = manifest.pod["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(metrics["containerPort"])


def test_the_proxy_is_that_of_compose_and_reads_files_that_are_mounted(manifest):
    composed = yaml.safe_load(COMPOSE_TLS.read_text("utf-8"))["services"]["proxy"]
    assert composed["image"] == f"${{HAPROXY_IMAGE:-{manifest.proxy['image']}}}"
    assert composed["command"] == manifest.proxy["command"]
    mounts = mounts_of(manifest.proxy)
    environ = {one["name"]: one.get("value", "") for one in manifest.proxy["env"]}
    files = [environ["ROUTETRACE_PROXY_PEM"], environ["ROUTETRACE_PROXY_CA"]]
    assert files == [f"{mounts['tls']}/{name}" for name in ("tls.crt", "ca.crt")]
    assert manifest.proxy["command"][1] == f"{mounts['proxy']}/run.sh"
    for probe in ("livenessProbe", "readinessProbe"):
        assert manifest.proxy[probe]["tcpSocket"] == {"port": "grpc"}


def test_probes_ask_for_pages_that_exist(manifest):
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = manifest.container[kind]["httpGet"]
        assert probe["path"] in {"/livez", "/readyz"}
        assert probe["port"] == "metrics"
    assert manifest.container["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_volumes_and_mounts_are_the_same(manifest):
    volumes = {volume["name"] for volume in manifest.pod["spec"]["volumes"]}
    assert {*manifest.mounts, *mounts_of(manifest.proxy)} == volumes | {*manifest.claims}


def test_stored_rows_fit_their_volume(tmp_path):
    disk, config = Manifest("server"), config_of(Manifest("server"), tmp_path)
    path = PurePosixPath(disk.mounts["traces"])
    assert PurePosixPath(config.data_dir) == path
    assert str(path) == STAGES["server"].value("VOLUME")
    assert gib(disk.claims["traces"]) > gib(disk.flags["store-capacity"])
    assert disk.set["spec"]["replicas"] == 1


def test_servers_over_an_object_store_have_no_disk(tmp_path):
    several, config = Manifest("object"), config_of(Manifest("object"), tmp_path)
    assert config.store == "object"
    assert not several.claims
    assert several.set["spec"]["replicas"] > 1
    spread, budget = (
        several.pod["spec"]["topologySpreadConstraints"],
        several.one("PodDisruptionBudget"),
    )
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname"]
    assert budget["spec"]["maxUnavailable"] == 1
    service = several.one("Service")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]  # a standby that takes over has its name at once


def test_memory_has_room_above_its_limit(manifest):
    limit = manifest.container["resources"]["limits"]["memory"]
    assert gib(limit) > gib(manifest.flags["memory-limit"])


def test_the_user_is_that_of_the_image(manifest):
    user, group = map(int, STAGES["server"].value("USER").split(":"))
    security = manifest.pod["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (
        user,
        group,
        group,
    )
    for container in (manifest.container, manifest.proxy):
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not own["allowPrivilegeEscalation"]


def test_the_key_is_of_a_mode_that_the_server_takes(manifest):
    [tls] = (v["secret"] for v in manifest.pod["spec"]["volumes"] if v["name"] == "tls")
    # Files of a Secret are of root; fsGroup gives them to the server's group, which may read them.
    assert tls["defaultMode"] == 0o440
    assert manifest.pod["spec"]["securityContext"]["fsGroup"]


def test_labels_select_the_pods(manifest):
    labels = manifest.pod["metadata"]["labels"]
    assert manifest.one("Service")["spec"]["selector"] == labels
    for each in manifest.objects:
        if each["kind"] != "Service":
            assert each["spec"]["selector"]["matchLabels"] == labels
    for each in manifest.pod["spec"].get("topologySpreadConstraints", ()):
        assert each["labelSelector"]["matchLabels"] == labels
    assert manifest.set["spec"]["serviceName"] == manifest.one("Service")["metadata"]["name"]


def test_docs_make_each_secret_and_the_files_of_the_proxy(manifest):
    text = (ROOT / "docs/operations.md").read_text("utf-8")
    spec = manifest.pod["spec"]
    secrets = [v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v]
    (files,) = [v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v]
    assert f"kubectl create configmap {files} --from-file=docker/proxy\n" in text
    secrets += [each["secretRef"]["name"] for each in manifest.container.get("envFrom", ())]
    for secret in secrets:
        assert re.search(rf"kubectl create secret \w+ {secret} ", text), secret
