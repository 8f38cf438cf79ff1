"""The arguments with which images are built where podman stands in for Docker."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(name="standin")
def _standin() -> ModuleType:
    path = Path(__file__).parents[1] / "docker/standin.py"
    spec = importlib.util.spec_from_file_location("standin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_configuration_of_pip_names_is_mounted(
    standin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint, wheels, index = tmp_path / "c.txt", tmp_path / "wheels", tmp_path / "index/simple"
    constraint.write_text("numpy<9\n")
    wheels.mkdir()
    index.mkdir(parents=True)
    listing = (
        f":env:.find-links='{wheels} {tmp_path / 'is-not-there'}'\n"
        ":env:.default-timeout='180'\n"
        "global.cert='/etc/ssl/certs/ca-certificates.crt'\n"
        f"global.constraint='{constraint}'\n"
        f"global.extra-index-url='file://{index}'\n"
    )
    monkeypatch.setattr(standin, "call", lambda *_command: listing)
    work = tmp_path / "work"
    work.mkdir()
    volumes = [w for w in standin.build_arguments(work).split() if w.startswith("--volume=")]
    mounted = {w.removeprefix("--volume=").removesuffix(":ro") for w in volumes}
    assert mounted == {
        f"{work}/pip.conf:/etc/pip.conf",
        "/etc/ssl/certs:/etc/ssl/certs",  # with the certificate that is named
        f"{constraint}:{constraint}",
        f"{wheels}:{wheels}",
        f"{index.parent}:{index.parent}",
    }
    assert f"constraint = {constraint}\n" in (work / "pip.conf").read_text()
