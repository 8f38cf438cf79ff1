"""A run in all partitions of a bucket that two servers share, through the death of each."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from faults.script import RUN
from routetrace.client import RouteClient
from routetrace.common.errors import NotFound, PermissionDenied
from routetrace.common.security import Security
from routetrace.server.store.object.bucket import open_bucket
from routetrace.server.testing import run_server
from support.agents.rollouts import Rollouts
from support.servers.fake_s3 import FakeS3
from support.servers.object_servers import ObjectServer, owned_by
from support.waiting import wait_for

BOUND_S = 120.0
SCOPES = {"users": ["ingest", "read", "admin"], "peers": ["admin"]}


def tokens(directory: Path) -> Path:
    """Tokens of users, and of servers among themselves."""
    (directory / "peers").write_text("token-of-peers\n")
    lines = []
    for name, scopes in SCOPES.items():
        digest = hashlib.sha256(f"token-of-{name}".encode()).hexdigest()
        lines.append(f'[[token]]\nname="{name}"\nsha256="{digest}"\nscopes={scopes}\nruns=["*"]\n')
    file = directory / "tokens.toml"
    file.write_text("".join(lines))
    return file


def certificates(directory: Path) -> dict[str, Path]:
    """PEM files of an authority, a server and a client."""
    ca = trustme.CA()
    files = {name: directory / f"{name}.pem" for name in ("ca", "server", "client")}
    ca.cert_pem.write_to_path(str(files["ca"]))
    for name, identity in (("server", "127.0.0.1"), ("client", "client@example.org")):
        issued = ca.issue_cert(identity)
        files[name].touch(0o600)
        issued.private_key_and_cert_chain_pem.write_to_path(str(files[name]))
    return files


@pytest.mark.long
def test_turns_go_on_while_each_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    files = certificates(tmp_path)
    secure = {
        "tls_cert": files["server"],
        "tls_key": files["server"],
        "tls_client_ca": files["ca"],
        "tokens_file": tokens(tmp_path),
    }
    shared_settings = {
        "spread_runs": '["*"]',
        "peer_token_file": tmp_path / "peers",
        "peer_ca_file": files["ca"],
        "sweep_interval_seconds": 0.5,
    }

    def security(name: str) -> Security:
        return Security(
            token=f"token-of-{name}",
            ca_file=str(files["ca"]),
            cert_file=str(files["client"]),
            key_file=str(files["client"]),
        )

    users = security("users")
    with ExitStack() as stack:
        s3 = stack.enter_context(FakeS3())
        bucket = open_bucket("s3://bucket/runs", s3.endpoint)
        servers = [
            ObjectServer(tmp_path, s3.endpoint, workers=2, **secure, **shared_settings)
            for _ in range(2)
        ]
        for server in servers:
            stack.enter_context(server)

        def shared() -> bool:
            return all(len(owned_by(bucket, 2, server.target)) == 1 for server in servers)

        wait_for(shared, BOUND_S)
        alone = stack.enter_context(run_server(**secure))
        target = ",".join(server.target for server in servers)
        rollouts = stack.enter_context(Rollouts(alone.target, target, 1, security=users))
        one = stack.enter_context(
            RouteClient(alone.target, run=RUN, timeout=BOUND_S, security=users)
        )
        client = stack.enter_context(RouteClient(target, run=RUN, timeout=BOUND_S, security=users))
        for server in servers:
            rollouts.turns(12, 6)
            rollouts.compare(one, client)
            server.kill()
            rollouts.turns(6, 6)
            rollouts.compare(one, client)
            server.start()
            wait_for(shared, BOUND_S)
            rollouts.turns(6, 6)
            rollouts.compare(one, client)
        info = client.server_info()
        assert (info.num_agents, info.runs) == (6, (RUN,))
        assert info.run_bytes == one.server_info().run_bytes
        client.delete("t0")
        with pytest.raises(NotFound, match=r"deleted at .* by token users"):
            client.get("t0")
        other = stack.enter_context(RouteClient(target, run=RUN, security=security("peers")))
        with pytest.raises(PermissionDenied):
            other.get("t1")
