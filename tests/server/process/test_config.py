"""Settings: which source wins, and what is refused."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from routetrace.server import daemon
from routetrace.server.common.addresses import is_loopback, split_address
from routetrace.server.settings.config import ConfigError, ServerConfig
from routetrace.server.settings.loading import load_config


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ROUTETRACE_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("sources", range(8))
def test_flags_over_environment_over_file_over_defaults(
    sources: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, flags = 86400, []
    if sources & 1:
        (tmp_path / "server.toml").write_text("default_ttl_seconds = 11\n")
        flags = ["--config", str(tmp_path / "server.toml")]
        want = 11
    if sources & 2:
        monkeypatch.setenv("ROUTETRACE_DEFAULT_TTL_SECONDS", "22")
        want = 22
    if sources & 4:
        flags += ["--default-ttl-seconds", "33"]
        want = 33
    assert load_config(flags).default_ttl_seconds == want


def test_every_setting_can_come_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {
        "listen": "[::1]:0",
        "advertise": "h:1",
        "insecure": "true",
        "tls_cert": "cert.pem",
        "tls_key": "key.pem",
        "tls_client_ca": "ca.pem",
        "tokens_file": "tokens.toml",
        "reflection": "true",
        "metrics_listen": "[::]:9090",
        "page_listen": "[::1]:7410",
        "page_hosts": '["traces.example"]',
        "workers": "1",
        "run_workers": '{"a": 0}',
        "spread_runs": "[]",
        "peer_token_file": "peer-token",
        "peer_ca_file": "peer-ca.pem",
        "store": "object",
        "object_url": "s3://b/p",
        "object_endpoint": "http://127.0.0.1:8333",
        "object_lease_seconds": "7",
        "object_cache": "4MiB",
        "object_cache_dir": "cache",
        "object_cache_disk": "5GiB",
        "data_dir": "d",
        "ack_mode": "fsync",
        "store_capacity": "3GiB",
        "memory_limit": "2GiB",
        "run_quota": "1GiB",
        "run_quotas": '{"a": "5MiB", "b.c": 7}',
        "when_full": "refuse",
        "max_chunk_bytes": "1MiB",
        "max_reads": "9",
        "max_streaming_reads": "8",
        "stalled_read_seconds": "11",
        "max_agents": "7",
        "max_writers": "17",
        "max_slots": "18",
        "token_quota": "4GiB",
        "max_ingest_bytes": "6MiB",
        "forbid_prefix_rows": '["a", "grpo-*"]',
        "default_ttl_seconds": "5",
        "sweep_interval_seconds": "0.5",
        "heartbeat_seconds": "0.25",
        "agent_timeout_seconds": "0",
        "drain_seconds": "0",
        "log_level": "debug",
        "log_format": "json",
        "ready_file": "r",
    }
    assert values.keys() == ServerConfig.model_fields.keys()
    file = tmp_path / "c.toml"
    tables = {
        "run_quotas": '{a = "5MiB", "b.c" = 7}',
        "run_workers": "{a = 0}",
        "forbid_prefix_rows": '["a", "grpo-*"]',
        "spread_runs": "[]",
        "page_hosts": '["traces.example"]',
    }
    lines = [f"{name} = {tables.get(name) or repr(value)}\n" for name, value in values.items()]
    file.write_text("".join(lines))
    from_file = load_config([f"--config={file}"])
    flags = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value == "true" else [flag, value]
    from_flags = load_config(flags)
    for name, value in values.items():
        monkeypatch.setenv(f"ROUTETRACE_{name.upper()}", value)
    from_env = load_config([])
    assert from_file.model_dump() == from_flags.model_dump() == from_env.model_dump()
    assert from_env.store_capacity == 3 << 30
    assert [from_env.quota_of(run) for run in ("a", "b.c", "other")] == [5 << 20, 7, 1 << 30]
    forbidden = [from_env.forbids_prefix_rows(run) for run in ("a", "grpo-1", "ab")]
    assert forbidden == [True, True, False]
    assert 1 << 20 < from_env.max_message_bytes < 2 << 20
    assert from_env.ready_file == Path("r")
    # Built directly, it knows nothing of its surroundings.
    assert ServerConfig().listen == "127.0.0.1:7411"
    assert ServerConfig(store="memory").data_dir == Path("routetrace-data")


def test_spread_runs_are_names_and_patterns_without_rows_of_other_traces() -> None:
    config = load_config(["--workers=2", "--spread-runs", '["a", "grpo-*"]'])
    assert config.spread_runs == ["a", "grpo-*"]
    assert [config.forbids_prefix_rows(run) for run in ("a", "grpo-1", "ab")] == [True, True, False]


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text('store = "memory"\n')
    monkeypatch.setenv("ROUTETRACE_CONFIG", str(tmp_path / "c.toml"))
    assert load_config([]).store == "memory"


def test_variables_of_others_are_no_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ROUTETRACE_TARGET",
        "ROUTETRACE_RUN",
        # Kubernetes, for services called routetrace and routetrace-server.
        "ROUTETRACE_PORT",
        "ROUTETRACE_SERVICE_HOST",
        "ROUTETRACE_SERVICE_PORT_GRPC",
        "ROUTETRACE_PORT_7411_TCP_ADDR",
        "ROUTETRACE_SERVER_PORT_7411_TCP",
        "ROUTETRACE_SERVER_SERVICE_PORT",
    ):
        monkeypatch.setenv(name, "x")
    load_config([])


@pytest.mark.parametrize(
    ("flags", "env", "file", "names"),
    [
        (["--bogus", "1"], {}, "", ["--bogus"]),
        (["--drain", "1"], {}, "", ["--drain"]),
        (["stray"], {}, "", ["stray"]),
        (["--store"], {}, "", ["--store"]),
        (["--config"], {}, None, ["--config"]),
        (["--config", "/does/not/exist"], {}, None, ["/does/not/exist"]),
        ([], {"ROUTETRACE_LISTN": "x"}, "", ["ROUTETRACE_LISTN"]),
        ([], {}, "colour = 1\nsize = 2\n", ["colour", "size", "c.toml"]),
        ([], {}, "[store]\nkind = 1\n", ["store"]),
        ([], {}, "listen = \n", ["c.toml", "line 1"]),
        (["--store", "redis"], {}, "", ["store", "redis", "disk", "memory"]),
        (["--drain-seconds", "-1"], {}, "", ["drain_seconds", "-1"]),
        (["--store-capacity", "lots"], {}, "", ["store_capacity is 'lots'; expected a size"]),
        (
            ["--memory-limit", "-1"],
            {},
            "",
            ["memory_limit is '-1'; expected a size such as 16GiB, or 0"],
        ),
        (["--object-cache", "1XB"], {}, "", ["object_cache is '1XB'; expected a size"]),
        ([], {"ROUTETRACE_ACK_MODE": "never"}, "", ["ack_mode", "never", "fsync"]),
        (["--tokens", "t.toml"], {}, "", ["--tokens is an old name; use --tokens-file"]),
        (["--over-quota=evict"], {}, "", ["--over-quota is an old name; use --when-full"]),
        (
            [],
            {"ROUTETRACE_MAX_SENDING_READS": "8"},
            "",
            ["ROUTETRACE_MAX_SENDING_READS is", "use ROUTETRACE_MAX_STREAMING_READS"],
        ),
        ([], {}, 'tokens = "t"\n', ["tokens is an old name; use tokens_file"]),
        (["--listen", "7411"], {}, "", ["listen", "7411", "host:port"]),
        (["--listen", "127.0.0.1:70000"], {}, "", ["listen", "70000", "host:port"]),
        (["--listen", "0.0.0.0:7411"], {}, "", ["listen", "0.0.0.0", "tls_cert", "insecure"]),
        (["--listen", "example.org:1"], {}, "", ["listen", "example.org", "tls_cert"]),
        (["--metrics-listen", "9090"], {}, "", ["metrics_listen", "9090", "host:port"]),
        (["--max-chunk-bytes", "2GiB"], {}, "", ["max_chunk_bytes", "2GiB"]),
        (["--max-message-bytes", "64MiB"], {}, "", ["--max-message-bytes"]),
        (["--max-reads", "0"], {}, "", ["max_reads", "0"]),
        (["--max-streaming-reads", "0"], {}, "", ["max_streaming_reads"]),
        (["--max-agents", "0"], {}, "", ["max_agents"]),
        (["--max-ingest-bytes", "0"], {}, "", ["max_ingest_bytes"]),
        (["--heartbeat-seconds", "0"], {}, "", ["heartbeat_seconds"]),
        (["--when-full", "drop"], {}, "", ["when_full", "drop", "evict", "refuse"]),
        (["--run-quotas", "lots"], {}, "", ["run_quotas"]),
        ([], {}, 'run_quotas = {a = "much"}\n', ["run_quotas", "much"]),
        ([], {}, "memory_limit = -1\n", ["memory_limit", "-1"]),
        (["--tls-cert", "c.pem"], {}, "", ["tls_cert", "tls_key", "both"]),
        (["--tls-client-ca", "c.pem"], {}, "", ["tls_client_ca", "tls_cert"]),
        (["--store", "object"], {}, "", ["store", "object_url"]),
        (
            ["--store=object", "--object-url=s3://b/p", "--workers=2", "--advertise=0.0.0.0:1"],
            {},
            "",
            ["advertise is '0.0.0.0:1'", "expected advertise to be the host:port"],
        ),
        (
            ["--spread-runs", '["grpo-*"]'],
            {},
            None,
            ["spread_runs is ['grpo-*'] with workers = 1", "expected several workers"],
        ),
        (
            [
                "--spread-runs",
                '["a"]',
                "--workers=2",
                "--store=object",
                "--object-url=s3://b/p",
                "--tokens-file=t",
            ],
            {},
            None,
            ["peer_token_file is None, tokens_file is t: expected both or neither"],
        ),
        (
            ["--spread-runs", '["grpo-*"]', "--workers=2", "--run-workers", '{"grpo-1": 1}'],
            {},
            None,
            ["run_workers names run 'grpo-1', which spread_runs has"],
        ),
    ],
)
def test_mistakes_are_named_on_one_line(
    flags: list[str],
    env: dict[str, str],
    file: str | None,
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file is not None:
        (tmp_path / "c.toml").write_text(file)
        flags = [*flags, "--config", str(tmp_path / "c.toml")] if file else flags
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        load_config(flags)
    assert daemon.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("routetrace-server: ")
    assert [name for name in names if name not in line] == []


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("tls", [False, True])
def test_other_machines_are_served_with_tls_and_tokens_or_when_asked_to(
    tls: bool, tokens: bool, insecure: bool
) -> None:
    flags = ["--tls-cert=c.pem", "--tls-key=k.pem"] * tls + ["--tokens-file=t.toml"] * tokens
    flags += ["--insecure"] * insecure
    for address in ("0.0.0.0:0", "[::]:0", "10.1.2.3:1", "traces:7411"):
        if insecure or (tls and tokens):
            assert load_config(["--listen", address, *flags]).listen == address
        else:
            with pytest.raises(ConfigError) as error:
                load_config(["--listen", address, *flags])
            assert ("tls_cert" in str(error.value)) != tls
            assert ("tokens" in str(error.value)) != tokens
    for address in ("127.0.0.1:0", "127.8.8.8:1", "localhost:1", "[::1]:1"):
        assert load_config(["--listen", address, *flags]).listen == address


def test_the_settings_that_the_documentation_shows_can_be_used(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text("utf-8")
    (shown,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "c.toml").write_text(shown)
    config = load_config(["--config", str(tmp_path / "c.toml")])
    assert config.run_quotas == load_config(["--run-quotas", "nightly=50GiB"]).run_quotas


def test_help_tells_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        daemon.main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in ServerConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert f"[env: ROUTETRACE_{name.upper()}]" in text
        assert field.description
        assert field.description in text
    assert "--config" in text
    # No names of types, bytes as a number or words of pydantic.
    for word in ("ByteSize", "dict[", "factory", "null", "default: )", "False"):
        assert word not in text
    assert not re.search(r"(?<!:)\b\d{5,}", text)  # ports aside, digits in groups
    assert text.count("(default: ") == 1 + len(ServerConfig.model_fields)
    for words in (
        "(default: 64GiB)",
        "(default: 4,294,967,296)",
        "--advertise HOST:PORT",
        "--object-url URL",
        "--object-endpoint URL",
        "--tls-cert FILE",
    ):
        assert words in text


@pytest.mark.parametrize("command", ["health", "token", "backup", "restore"])
def test_help_of_subcommands_has_the_style_of_the_server(command, capsys):
    with pytest.raises(SystemExit) as end:
        daemon.main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    usage, _, options = text.partition("options:")
    assert usage.startswith(f"usage: routetrace-server {command} [-h] [--version]")
    assert "print this text and exit" in options
    metavars = re.findall(r"^  --[\w-]+ (\S+)", options, re.M)
    known = {"HOST:PORT", "SECONDS", "FILE", "DIR", "NAME", "RUN", "ENGINE", "TIME"}
    assert {m for m in metavars if m[0] != "{"} <= known
    # Each option with a value says its default, or that it must be given.
    stated = re.findall(r"\((?:default: |required\))", " ".join(options.split()))
    assert len(stated) == len(metavars) + (command == "health")


@pytest.mark.parametrize(
    "words", [[], ["health"], ["token"], ["backup"], ["restore"], ["--listen", "nonsense"]]
)
def test_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        daemon.main([*words, "--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{version('routetrace')}\n"


def test_addresses() -> None:
    assert split_address("localhost:1") == ("localhost", 1)
    assert split_address("[::1]:65535") == ("::1", 65535)
    for wrong in ("", ":1", "host", "host:", "host:x", "::1:5", "host:-1", "h:\u0661"):
        with pytest.raises(ValueError, match="host:port"):
            split_address(wrong)
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("0.0.0.0")
