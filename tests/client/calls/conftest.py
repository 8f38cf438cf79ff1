"""A scripted server, and either client of it."""

from __future__ import annotations

import pytest

from routetrace.client import AsyncRouteClient, RouteClient
from support.servers.client_server import ScriptedServer
from support.servers.scripted import GONE, Blocking


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def connect(request):
    made = []

    def connect(target, **kwargs):
        if request.param == "sync":
            client = RouteClient(target, **kwargs)
        else:
            client = Blocking(AsyncRouteClient(target, **kwargs))
        made.append(client)
        return client

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(connect, server):
    return connect(server.target, timeout=GONE)
