"""Records: the stored form of every change, apart from payloads.

The record of a chunk holds the ChunkHeader as received.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.common.layout import ModelLayout
from routetrace.server.index.records.format import HEAD, check_format
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

#: Block ids that are hashed at a time.
_HASHED = 1 << 13


class Sums(NamedTuple):
    """Checksums of a chunk."""

    header: int
    payload: int


def encode_open(
    now: float,
    writer: tuple[str, str, str],
    *,
    epoch: int,
    boot_id: str,
    layout: ModelLayout,
    block_size: int,
    num_blocks: int,
    token: str = "",
    model: int = 0,
    says_unknown_versions: bool = False,
    restarted: bool = False,
) -> bytes:
    """Return the record of a writer that opens an epoch; `token` is the agent's, if any."""
    opened = stored.Open(
        writer=key_to_stored(writer),
        epoch=epoch,
        boot_id=boot_id,
        layout=layout_to_stored(layout),
        block_size=block_size,
        num_blocks=num_blocks,
        token=token,
        model=model,
        says_unknown_versions=says_unknown_versions,
        restarted=restarted,
    )
    return _encode(stored.Record(time=now, open=opened))


def encode_chunk(
    writer: tuple[str, str, str], epoch: int, sequence: int, sums: Sums, now: float, header: bytes
) -> bytes:
    """Return the record of a chunk."""
    record = stored.Record(time=now)
    chunk = record.chunk
    chunk.writer.run, chunk.writer.engine_id, chunk.writer.shard = writer
    chunk.epoch, chunk.sequence = epoch, sequence
    chunk.header_crc32, chunk.payload_crc32 = sums
    chunk.header = header
    return _encode(record)


def encode_bind(
    now: float,
    request: pb.BindRequestRequest,
    trace_id: str,
    block_ids: npt.NDArray[np.uint32],
    num_computed_tokens: int,
) -> bytes:
    """Return the record of a request that is named behind KV blocks.

    Args:
        now: Unix time in seconds.
        request: the checked request.
        trace_id: trace of the request.
        block_ids: its checked blocks.
        num_computed_tokens: leading tokens that a forward pass computed.
    """
    bind = stored.Bind(
        run=request.run,
        engine_id=request.engine_id,
        request_id=request.request_id,
        block_ids=block_ids.tobytes(),
        num_tokens=request.num_tokens,
        num_computed_tokens=num_computed_tokens,
        step=request.step,
        digests=request.token_digests,
        trace_id=trace_id,
        prompt_len=request.begin.prompt_len,
        labels=request.begin.labels,
        ttl_seconds=request.begin.ttl_seconds,
    )
    return _encode(stored.Record(time=now, bind=bind))


def encode_delete(
    now: float,
    run: str,
    trace_ids: Iterable[str],
    reason: str,
    token: str = "",
    *,
    judged: int = 0,
    begun: tuple[float, float] = (0.0, 0.0),
) -> bytes:
    """Return the record of a deletion.

    Args:
        now: Unix time in seconds.
        run: namespace.
        trace_ids: the traces.
        reason: key of a tombstone's `Fate`.
        token: name of the caller's token, if any.
        judged: traces that a record after this one changed stay; 0: all are deleted.
        begun: of the traces, only requests that began in this closed interval are dropped; zeros:
            all.
    """
    delete = stored.Delete(run=run, trace_ids=trace_ids, reason=reason, token=token, judged=judged)
    delete.since, delete.until = begun
    return _encode(stored.Record(time=now, delete=delete))


def encode_renew(
    now: float, run: str, trace_ids: Iterable[str], ttl: float, *, keep_longer: bool = False
) -> bytes:
    """Return the record of leases that run `ttl` seconds from now on.

    Args:
        now: time of the record.
        run: namespace.
        trace_ids: the traces.
        ttl: seconds.
        keep_longer: whether leases stay unchanged that are longer when the record is applied.
    """
    renew = stored.Renew(run=run, trace_ids=trace_ids, ttl=ttl, keep_longer=keep_longer)
    return _encode(stored.Record(time=now, renew=renew))


def encode_forget(now: float, run: str, engine_id: str) -> bytes:
    """Return the record of an engine that is forgotten."""
    forget = stored.Forget(run=run, engine_id=engine_id)
    return _encode(stored.Record(time=now, forget=forget))


def encode_agreement(now: float, run: str, report: pb.AgreementReport) -> bytes:
    """Return the record of a trainer's agreement in one step."""
    agreement = stored.Agreement(
        run=run,
        step=report.step,
        reporter=report.reporter,
        report=report.SerializeToString(deterministic=True),
    )
    return _encode(stored.Record(time=now, agreement=agreement))


def _encode(record: stored.Record) -> bytes:
    return HEAD + record.SerializeToString(deterministic=True)


def decode_record(data: bytes) -> stored.Record:
    """Return a record.

    Raises:
        UnsupportedFormat: if it has another format.
        DecodeError: if it is damaged.
    """
    check_format(data, "a record")
    return stored.Record.FromString(data[len(HEAD) :])


def hash_of(facts: Any) -> str:
    """Return a hash of facts, the same in all formats."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def hash_of_bind(
    request_id: str, block_ids: npt.NDArray[np.uint32], num_tokens: int, step: int
) -> Generator[None, None, str]:
    """Return `hash_of` the list of the arguments, computed piece by piece."""
    digest = hashlib.blake2b(f"[{json.dumps(request_id)}, [".encode(), digest_size=16)
    for at in range(0, len(block_ids), _HASHED):
        part = ", ".join(map(str, block_ids[at : at + _HASHED].tolist()))
        digest.update(f"{', ' if at else ''}{part}".encode())
        yield
    digest.update(f"], {num_tokens}, {step}]".encode())
    return digest.hexdigest()


def key_to_stored(key: tuple[str, str, str]) -> stored.WriterKey:
    """Return the stored form of a writer's key."""
    run, engine_id, shard = key
    return stored.WriterKey(run=run, engine_id=engine_id, shard=shard)


def layout_to_stored(layout: ModelLayout) -> stored.Layout:
    """Return the stored form of a layout."""
    return stored.Layout(
        layer_ids=layout.layer_ids,
        moe_layer_ids=layout.moe_layer_ids,
        num_hidden_layers=layout.num_hidden_layers,
        num_experts=layout.num_experts,
        top_k=layout.top_k,
    )


def layout_from_stored(message: stored.Layout) -> ModelLayout:
    """Return the layout of a stored form: the same object for all writers of a model.

    Raises:
        InvalidArgument: if it is invalid.
    """
    return _layout(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=64)
def _layout(data: bytes) -> ModelLayout:
    message = stored.Layout.FromString(data)
    return ModelLayout(
        tuple(message.layer_ids),
        message.num_hidden_layers,
        message.num_experts,
        message.top_k,
        tuple(message.moe_layer_ids),
    )
