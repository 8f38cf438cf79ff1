"""Settings of the daemon: flags over environment over file over defaults."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ByteSize,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ENV_PREFIX = "ROUTETRACE_"

# Variables of ours that are not settings of the server.
_OTHER_ENV = frozenset(
    {
        "ROUTETRACE_CONFIG",
        "ROUTETRACE_TARGET",
        "ROUTETRACE_RUN",
        "ROUTETRACE_TLS",
        "ROUTETRACE_CA_FILE",
        "ROUTETRACE_CERT_FILE",
        "ROUTETRACE_KEY_FILE",
        "ROUTETRACE_SERVER_NAME",
        "ROUTETRACE_TOKEN",
        "ROUTETRACE_TOKEN_FILE",
        "ROUTETRACE_INSECURE_CLIENT",
        "ROUTETRACE_ENGINE_ID",
        "ROUTETRACE_VLLM",
    }
)
# Kubernetes sets these in every pod of a namespace that has a service called routetrace[-...].
_SERVICE_ENV = re.compile(
    r"ROUTETRACE(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# What an IngestRequest adds around the bytes of its chunk.
_MESSAGE_OVERHEAD = 65536

AckMode = Literal["fsync", "memory"]
OverQuota = Literal["evict", "refuse"]
LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ConfigError(Exception):
    """The settings can not be used; the message names each one at fault, on one line."""


class ServerConfig(BaseSettings):
    """Settings of the daemon. Built directly, it takes keyword arguments and defaults alone."""

    _sources: ClassVar[tuple[str, ...]] = ("init_settings",)

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        cli_prog_name="routetrace-server",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_exit_on_error=False,
    )

    listen: str = Field(
        "127.0.0.1:7411", description="host:port to serve on; port 0 takes a free one"
    )
    insecure: bool = Field(
        False,
        description="serve other machines although there is no TLS, or no token is asked for",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate and those above it; switches TLS on"
    )
    tls_key: Path | None = Field(None, description="PEM file of its key")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of authorities; clients must have a certificate of one of them"
    )
    tokens: Path | None = Field(
        None, description="TOML file of the bearer tokens that are taken; asks every call for one"
    )
    reflection: bool = Field(False, description="serve gRPC reflection, for grpcurl and the like")
    metrics_listen: str = Field(
        "", description="host:port to serve Prometheus metrics on, over plain HTTP; none if empty"
    )
    store: Literal["disk", "memory"] = Field(
        "disk", description="where chunks are kept; memory forgets them when the server ends"
    )
    data_dir: Path = Field(Path("routetrace-data"), description="directory of the disk store")
    ack_mode: AckMode = Field(
        "fsync",
        description="acknowledge chunks once they are on disk (fsync), or once they are queued "
        "for it (memory: a crash loses what was acknowledged in the moments before)",
    )
    store_capacity: ByteSize = Field(
        ByteSize(64 << 30),
        gt=0,
        description="most bytes to keep, such as 64GiB; chunks are refused beyond it",
    )
    memory_limit: ByteSize = Field(
        ByteSize(0),
        description="most memory of the process, such as 16GiB; chunks are refused beyond it, and "
        "finished traces go before; 0: no limit",
    )
    run_quota: ByteSize = Field(
        ByteSize(0), description="most stored bytes of a run that has no quota of its own; 0: none"
    )
    run_quotas: dict[str, ByteSize] = Field(
        default_factory=dict, description="most stored bytes by run, as JSON, or a table in a file"
    )
    over_quota: OverQuota = Field(
        "evict",
        description="what happens above nine tenths of the capacity, the memory limit or a quota: "
        "finished traces go, the oldest first (evict), or nothing, until chunks are refused "
        "(refuse)",
    )
    max_chunk_bytes: Annotated[ByteSize, Field(ge=1024, le=1 << 30)] = Field(
        ByteSize(8 << 20), description="largest chunk that is taken"
    )
    max_reads: int = Field(
        20_000, ge=1, description="most reads at a time, those that wait included; more are refused"
    )
    max_sending_reads: int = Field(
        256,
        ge=1,
        description="most reads that are sent rows at a time, each of which takes some 2 MiB; the "
        "others wait for their turn",
    )
    max_agents: int = Field(4096, ge=1, description="most agents at a time; more are refused")
    max_ingest_bytes: ByteSize = Field(
        ByteSize(256 << 20),
        gt=0,
        description="most bytes of chunks that wait for their commit; more are left in the sockets",
    )
    default_ttl_seconds: int = Field(
        86400, ge=1, lt=1 << 32, description="life of a trace that names none, from its last change"
    )
    sweep_interval_seconds: float = Field(
        10, gt=0, description="time between two rounds of expiry and compaction"
    )
    heartbeat_seconds: float = Field(
        10,
        ge=0.1,
        le=3600,
        description="time between two signs of life that agents are asked for; at most half of "
        "agent_timeout_seconds",
    )
    agent_timeout_seconds: float = Field(
        20, ge=0, description="an agent counts as lost after this time without a sign of life"
    )
    drain_seconds: float = Field(10, ge=0, description="time that open calls are given at shutdown")
    log_level: LogLevel = Field("info", description="least level that is logged")
    log_format: LogFormat = Field(
        "auto", description="console lines or JSON; auto: console on a terminal"
    )
    ready_file: Path | None = Field(
        None,
        description="file to write host:port to, once the server is ready; that of the metrics, if "
        "they are served, on a second line",
    )

    @property
    def host_port(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return split_address(self.listen)

    @property
    def max_message_bytes(self) -> int:
        """Largest message that is taken; a longer one is refused before it is read."""
        return self.max_chunk_bytes + _MESSAGE_OVERHEAD

    @property
    def heartbeat_ms(self) -> int:
        """Milliseconds between two signs of life; an agent may miss one without being lost."""
        return int(1000 * min(self.heartbeat_seconds, self.agent_timeout_seconds / 2))

    def quota_of(self, run: str) -> int:
        """Most stored bytes of a run; 0: as many as there is room for."""
        return self.run_quotas.get(run, self.run_quota)

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_listen(cls, value: str, info: ValidationInfo) -> str:
        if value or info.field_name == "listen":
            split_address(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: expected both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca: expected tls_cert and tls_key beside it")
        lacking = [name for name in ("tls_cert", "tokens") if getattr(self, name) is None]
        if lacking and not self.insecure and not is_loopback(self.host_port[0]):
            raise ValueError(
                f"listen is {self.listen!r}, which other machines can reach: expected "
                f"{' and '.join(lacking)}, a loopback address, or insecure to be set"
            )
        return self

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, _: type[BaseSettings], **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Where settings come from, highest first."""
        return tuple(sources[name] for name in cls._sources)


class _LayeredConfig(ServerConfig):
    """Takes routing from inference engines and serves it to trainers.

    Flags come before the environment, the environment before the TOML file that --config (or
    ROUTETRACE_CONFIG) names, and the file before the defaults. `routetrace-server health
    [--target host:port]` asks a running server whether it serves.
    """

    # Keyword arguments are what the file holds; pydantic puts flags before all others.

    _sources = ("env_settings", "init_settings")


def load_config(argv: Sequence[str]) -> ServerConfig:
    """Settings from flags, the environment (ROUTETRACE_*), a TOML file and defaults.

    Args:
        argv: flags, without the program's name. `--config PATH` (or ROUTETRACE_CONFIG) names the
            file. `--help` prints all flags and exits.

    Raises:
        ConfigError: if a setting is unknown or holds something that it must not.
    """
    path, flags = _take_config_flag(argv)
    path = path or os.environ.get("ROUTETRACE_CONFIG")
    values = _read_file(Path(path)) if path else {}
    _check_environment(os.environ)
    try:
        return _LayeredConfig(_cli_parse_args=flags, **values)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError("; ".join(map(_describe, error.errors()))) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6 host]:port".

    Raises:
        ValueError: if it is neither.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("expected host:port")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _take_config_flag(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    # The file must be read before the flags are: they are laid over it.
    path, rest = None, list(argv)
    for i, flag in enumerate(argv):
        if flag == "--config":
            if i + 1 == len(argv):
                raise ConfigError("--config: expected the path of a TOML file behind it")
            path, rest = argv[i + 1], [*argv[:i], *argv[i + 2 :]]
        elif flag.startswith("--config="):
            path, rest = flag.partition("=")[2], [*argv[:i], *argv[i + 1 :]]
    return path, rest


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} can not be read: {error}") from None
    unknown = values.keys() - ServerConfig.model_fields.keys()
    if unknown:
        raise ConfigError(f"config file {path} has unknown keys: {', '.join(sorted(unknown))}")
    return values


def _check_environment(environ: Mapping[str, str]) -> None:
    known = {(ENV_PREFIX + name).upper() for name in ServerConfig.model_fields} | _OTHER_ENV
    unknown = [
        name
        for name in environ
        if name.startswith(ENV_PREFIX) and name not in known and not _SERVICE_ENV.fullmatch(name)
    ]
    if unknown:
        raise ConfigError(f"unknown environment variables: {', '.join(sorted(unknown))}")


def _describe(error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return str(message)
    return f"{error['loc'][0]} is {str(error['input'])[:200]!r}: {message}"
