"""Authorities, and a server that asks for tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from routetrace.server.testing import ServerProcess, run_server
from support.servers.guarded import Pki, entry


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def mutual(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("mutual") / "tokens"
    path.write_text(entry("rt_secret", "a"))
    settings: dict[str, Any] = {
        "tls_client_ca": pki.ca,
        "tokens_file": path,
        **pki.server.of_server,
    }
    with run_server(metrics_listen="127.0.0.1:0", **settings) as server:
        yield server
