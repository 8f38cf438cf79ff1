"""Messages of read streams as they are sent: payloads are joined into them once, and not copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from routetrace.server import refs
from routetrace.server.reader import Fetched
from routetrace.server.served import Served
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.records import SPAN, U32

# Field 15 of GetTraceResponse and GetBlocksResponse, whose other fields are the same, too.
_PAYLOAD_TAG = b"\x7a"


def message(
    info: pb.TraceInfo | None = None,
    rows: Fetched | None = None,
    first_frame: int = 0,
    end: pb.ReadEnd | None = None,
) -> bytes:
    """A serialized GetTraceResponse or GetBlocksResponse.

    Args:
        info: facts of the trace.
        rows: some of its rows.
        first_frame: frames that were sent before.
        end: what closes the stream.
    """
    head: dict[str, Any] = {"info": info, "end": end}
    if rows is None:
        return pb.GetTraceResponse(**head).SerializeToString()
    head["spans"] = _spans(rows.spans, first_frame)
    head["frame_lengths"] = np.array(rows.frame_lengths, U32).tobytes()
    size = sum(rows.frame_lengths)
    # The payload comes last: its field is what is left of the message.
    return b"".join((pb.GetTraceResponse(**head).SerializeToString(), _field(size), *rows.payload))


def _spans(rows: Served, first_frame: int) -> bytes:
    spans = np.empty(len(rows), SPAN)
    spans["position"] = rows["position"]
    spans["count"] = rows["stop"] - rows["position"]
    spans["frame"] = rows["source"] + first_frame
    spans["row"] = rows["ref"] & refs.MAX_ROWS - 1
    spans["attempt"] = rows["attempt"]
    spans["provenance"] = rows["provenance"]
    spans["flags"] = 0
    spans["weight_version"] = rows["weight_version"]
    return spans.tobytes()


def _field(size: int) -> bytes:
    """What stands before a payload of so many bytes."""
    varint = bytearray(_PAYLOAD_TAG)
    while size > 127:
        varint.append(size & 127 | 128)
        size >>= 7
    varint.append(size)
    return bytes(varint)
