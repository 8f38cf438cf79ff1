"""Settings of the daemon, and the checks of each and of all together."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import (
    ByteSize,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from routetrace.server.common.addresses import is_loopback, split_address, split_object_url

ENV_PREFIX = "ROUTETRACE_"

_LAST_PORT = 65535
# Bytes that an IngestRequest adds to its chunk.
_MESSAGE_OVERHEAD = 65536

AckMode = Literal["fsync", "memory"]
WhenFull = Literal["evict", "refuse"]
LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ConfigError(Exception):
    """Invalid settings; the message names each of them on one line."""


class ServerConfig(BaseSettings):
    """Settings of the daemon; built directly, from keyword arguments and defaults alone."""

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
        "127.0.0.1:7411", description="host:port to listen on; port 0 picks a free port"
    )
    advertise: str = Field(
        "",
        description="host:port by which clients reach listen, for workers with store object: other "
        "servers send callers there; empty: listen",
    )
    insecure: bool = Field(
        False,
        description="allow a non-loopback listen address without TLS or tokens",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of the server certificate and its chain; enables TLS"
    )
    tls_key: Path | None = Field(None, description="PEM file of the private key of tls_cert")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of the authorities that must have signed client certificates",
    )
    tokens_file: Path | None = Field(
        None, description="TOML file of accepted bearer tokens; every call then needs one"
    )
    reflection: bool = Field(False, description="serve gRPC reflection (for grpcurl)")
    metrics_listen: str = Field(
        "", description="host:port for Prometheus metrics over plain HTTP; empty: no metrics"
    )
    page_listen: str = Field(
        "127.0.0.1:7410",
        description="host:port of the web page, a process of its own; empty: no page; other "
        "addresses than those of loopback have the rules of listen, and its certificate",
    )
    page_hosts: list[str] = Field(
        default_factory=list,
        description="JSON list of further names of this machine, host or host:port, by which "
        "browsers reach the page",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that share the runs, each on a port of its own from that of listen "
        "(and of metrics_listen) on, with a partition of its own in data_dir or object_url, for "
        "which their number is fixed",
    )
    run_workers: dict[str, int] = Field(
        default_factory=dict,
        description='worker index (from 0) of each listed run: JSON such as {"grpo": 1}, or a '
        "table in a file; other runs are placed by hash; with object_url it is fixed",
    )
    spread_runs: list[str] = Field(
        default_factory=list,
        description="JSON list of runs, or patterns such as grpo-*, that lie in all workers: each "
        "engine's rows in one, by hash; for a run that one core does not serve; with object_url it "
        "is fixed",
    )
    peer_token_file: Path | None = Field(
        None,
        description="file with the bearer token that servers which share an object_url show each "
        "other, with the scope admin for all spread_runs",
    )
    peer_ca_file: Path | None = Field(
        None,
        description="PEM file of the authorities that signed the certificates of those servers; "
        "empty: the system's",
    )
    store: Literal["disk", "memory", "object"] = Field(
        "disk",
        description="where chunks are stored; memory: lost when the server stops; object: in an "
        "S3-compatible object store, which several servers may name: one serves each partition",
    )
    object_url: str = Field(
        "",
        description="s3://bucket/prefix of the object store; credentials come from the AWS_* "
        "variables",
    )
    object_endpoint: str = Field(
        "", description="URL of an S3-compatible service; empty: Amazon S3, or AWS_ENDPOINT_URL"
    )
    object_lease_seconds: float = Field(
        5,
        ge=1,
        le=3600,
        description="seconds without a sign of life after which a standby takes the object store "
        "over",
    )
    object_cache: ByteSize = Field(
        ByteSize(256 << 20), description="memory that caches payloads of the object store"
    )
    object_cache_dir: Path | None = Field(
        None,
        description="directory of a local disk that caches payloads for which object_cache has no "
        "room; empty: none",
    )
    object_cache_disk: ByteSize = Field(
        ByteSize(16 << 30), description="maximum bytes of payloads in object_cache_dir"
    )
    data_dir: Path = Field(Path("routetrace-data"), description="directory of the disk store")
    ack_mode: AckMode = Field(
        "fsync",
        description="when chunks are acknowledged: once durable on disk (fsync), or once queued "
        "for it (memory; a crash loses the queue)",
    )
    store_capacity: ByteSize = Field(
        ByteSize(64 << 30),
        gt=0,
        description="maximum stored bytes, such as 64GiB; chunks beyond it are refused",
    )
    memory_limit: ByteSize = Field(
        ByteSize(0),
        description="maximum memory of the process, such as 16GiB: at it, chunks are refused; "
        "where traces take nearly half of it, finished ones are evicted (see when_full); 0: no "
        "limit",
    )
    run_quota: ByteSize = Field(
        ByteSize(0),
        description="maximum stored bytes of a run without its own quota, of which each worker has "
        "an N-th where the run is one of spread_runs; 0: no limit",
    )
    run_quotas: dict[str, ByteSize] = Field(
        default_factory=dict,
        description="maximum stored bytes by run: JSON, or a table in a file",
    )
    token_quota: ByteSize = Field(
        ByteSize(0),
        description="maximum stored bytes that one token sent, over all its runs; 0: no limit",
    )
    when_full: WhenFull = Field(
        "evict",
        description="action above 90 percent of the capacity, a quota or half of the memory limit: "
        "evict finished traces, oldest first (evict), or none, until chunks are refused at the "
        "limit (refuse)",
    )
    max_chunk_bytes: Annotated[ByteSize, Field(ge=1024, le=1 << 30)] = Field(
        ByteSize(8 << 20), description="maximum size of a chunk"
    )
    max_reads: int = Field(
        20_000,
        ge=1,
        description="maximum concurrent reads, waiting ones included; one token (or run) may hold "
        "at most as many as remain free, and further ones are refused; fewer if they would take "
        "over a quarter of memory_limit, at 20 KiB each",
    )
    max_streaming_reads: int = Field(
        256,
        ge=1,
        description="maximum concurrent streaming reads (about 2 MiB each); others queue",
    )
    stalled_read_seconds: float = Field(
        60, gt=0, description="seconds after which a read ends if its reader takes no message"
    )
    max_agents: int = Field(
        8192,
        ge=1,
        description="maximum connected agents; one token (or run) may hold at most as many as "
        "remain free, and further ones are refused",
    )
    max_writers: int = Field(
        32_768,
        ge=1,
        description="maximum remembered engine shards, connected or not; shared as max_agents",
    )
    max_slots: int = Field(
        1 << 32,
        ge=1,
        description="maximum KV slots of all engines, which take memory as they are written (about "
        "2 bytes each, at most 24); shared as max_agents",
    )
    max_ingest_bytes: ByteSize = Field(
        ByteSize(256 << 20),
        gt=0,
        description="maximum bytes of chunks not committed yet; more stay in the sockets",
    )
    forbid_prefix_rows: list[str] = Field(
        default_factory=list,
        description="JSON list of runs, or patterns such as grpo-*, in which rows of another "
        "trace never stand in for external KV",
    )
    default_ttl_seconds: int = Field(
        86400,
        ge=1,
        lt=1 << 32,
        description="default lease of a trace in seconds after a change",
    )
    sweep_interval_seconds: float = Field(
        10, gt=0, description="seconds between rounds of expiry and compaction"
    )
    heartbeat_seconds: float = Field(
        10,
        ge=0.1,
        le=3600,
        description="seconds between heartbeats of agents; half of agent_timeout_seconds if that "
        "is less",
    )
    agent_timeout_seconds: float = Field(
        20, ge=0, description="seconds without a message after which an agent counts as lost"
    )
    drain_seconds: float = Field(10, ge=0, description="seconds for open calls at shutdown")
    log_level: LogLevel = Field("info", description="minimum level of logged messages")
    log_format: LogFormat = Field(
        "auto", description="console lines or JSON; auto: console if stderr is a terminal"
    )
    ready_file: Path | None = Field(
        None,
        description="file that gets host:port once the server is ready, and on a second line that "
        "of the metrics, if enabled",
    )

    @property
    def host_port(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return split_address(self.listen)

    @property
    def advertised(self) -> str:
        """host:port at which clients reach `listen`."""
        return self.advertise or self.listen

    @property
    def max_message_bytes(self) -> int:
        """Maximum size of a message; a longer one is refused before it is read."""
        return self.max_chunk_bytes + _MESSAGE_OVERHEAD

    @property
    def heartbeat_ms(self) -> int:
        """Milliseconds between heartbeats; an agent may miss one without being lost."""
        return int(1000 * min(self.heartbeat_seconds, self.agent_timeout_seconds / 2))

    def quota_of(self, run: str) -> int:
        """Return the maximum stored bytes of a run in one worker; 0: no limit."""
        quota = self.run_quotas.get(run, self.run_quota)
        return -(-quota // self.workers) if self.spreads(run) else quota

    def spreads(self, run: str) -> bool:
        """Whether a run lies in all workers."""
        return any(fnmatchcase(run, pattern) for pattern in self.spread_runs)

    def forbids_prefix_rows(self, run: str) -> bool:
        """Whether rows of one trace of a run never stand in for another's."""
        forbidden = any(fnmatchcase(run, pattern) for pattern in self.forbid_prefix_rows)
        return forbidden or self.spreads(run)

    @field_validator("listen", "metrics_listen", "page_listen", "advertise")
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
            raise ValueError("tls_client_ca: expected tls_cert and tls_key too")
        if (self.store == "object") != bool(self.object_url):
            raise ValueError(
                f"store is {self.store!r} and object_url is {self.object_url!r}: expected store "
                "object with an object_url, or another store without"
            )
        if self.object_url:
            split_object_url(self.object_url)
            if self.ack_mode != "fsync":
                raise ValueError("ack_mode: expected fsync with store object")
        self._check_workers()
        lacking = [name for name in ("tls_cert", "tokens_file") if getattr(self, name) is None]
        for name in ("listen", "page_listen"):
            address = getattr(self, name)
            local = not address or is_loopback(split_address(address)[0])
            if lacking and not self.insecure and not local:
                raise ValueError(
                    f"{name} is {address!r}, which other machines can reach: expected "
                    f"{' and '.join(lacking)}, a loopback address, or insecure to be set"
                )
        return self

    def _check_workers(self) -> None:
        if self.spread_runs and self.workers == 1:
            raise ValueError(
                f"spread_runs is {self.spread_runs} with workers = 1: expected several workers"
            )
        lacks = (self.tokens_file is None) != (self.peer_token_file is None)
        if self.spread_runs and self.object_url and lacks:
            raise ValueError(
                f"peer_token_file is {self.peer_token_file}, tokens_file is {self.tokens_file}: "
                "expected both or neither with spread_runs and object_url, as servers call each "
                "other"
            )
        for run in self.run_workers:
            if self.spreads(run):
                raise ValueError(
                    f"run_workers names run {run!r}, which spread_runs has: expected one of them"
                )
        for run, number in self.run_workers.items():
            if not 0 <= number < self.workers:
                raise ValueError(
                    f"run_workers names worker {number} for run {run!r}: expected 0 to "
                    f"{self.workers - 1}, as workers is {self.workers}"
                )
        if self.workers == 1:
            return
        taken: set[int] = set()
        if self.store == "object":
            self._check_advertised()
        for name, address in (("listen", self.listen), ("metrics_listen", self.metrics_listen)):
            if not address:
                continue
            port = split_address(address)[1]
            ports = range(port, port + self.workers)
            if not port or ports[-1] > _LAST_PORT or not taken.isdisjoint(ports):
                raise ValueError(
                    f"{name} is {address!r} with workers = {self.workers}: expected a port with "
                    f"{self.workers - 1} ports after it for the other workers, none used twice"
                )
            taken.update(ports)

    def _check_advertised(self) -> None:
        host, port = split_address(self.advertised)
        if host in ("0.0.0.0", "::") or not 0 < port <= _LAST_PORT - self.workers + 1:
            raise ValueError(
                f"advertise is {self.advertise!r}, listen is {self.listen!r}: expected advertise "
                f"to be the host:port by which clients reach worker 0 of {self.workers}"
            )

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, _: type[BaseSettings], **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings, highest first."""
        return tuple(sources[name] for name in cls._sources)
