"""A server that records what agents send."""

from __future__ import annotations

import pytest

from support.servers.ingest_server import IngestServer


@pytest.fixture
def server():
    with IngestServer() as ingest:
        yield ingest
