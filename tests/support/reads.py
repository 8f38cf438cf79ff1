"""A naive reader of the contract, independent of the client: dicts of cells."""

from __future__ import annotations

import grpc
import numpy as np

from routetrace.codec.frame import decode_frame, read_header
from routetrace.codec.records import SPAN, U32
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc


class Reads:
    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(
            target,
            [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)],
        )
        self.stub = pb_grpc.TraceServiceStub(self.channel)
        self.ingest = pb_grpc.IngestServiceStub(self.channel)

    def get(self, trace_id: str, run: str = "default", timeout: float = 20, **fields):
        request = pb.GetTraceRequest(run=run, trace_id=trace_id, **fields)
        return collect(self.stub.GetTrace(request, timeout=timeout))

    def blocks(self, engine_id: str, run: str = "default", **fields):
        request = pb.GetBlocksRequest(run=run, engine_id=engine_id, **fields)
        return collect(self.stub.GetBlocks(request, timeout=20))

    def close(self) -> None:
        self.channel.close()


def collect(responses):
    """Cells (position, layer) -> (ids, weight version, attempt), ReadEnd, first TraceInfo."""
    cells: dict[tuple[int, int], tuple[np.ndarray, int, int]] = {}
    info = end = None
    num_spans = num_frames = 0
    for response in responses:
        assert end is None, "nothing follows the end"
        info = info or (response.info if response.HasField("info") else None)
        if response.HasField("end"):
            end = response.end
        frames, at = [], 0
        for length in np.frombuffer(response.frame_lengths, U32).tolist():
            frames.append(response.payload[at : at + length])
            at += length
        for span in np.frombuffer(response.spans, SPAN):
            num_spans += 1
            frame = frames[span["frame"] - num_frames]
            header, ids = read_header(frame), decode_frame(frame)
            for i in range(span["count"]):
                for column, layer in enumerate(header.layer_ids):
                    cells[int(span["position"]) + i, layer] = (
                        ids[column, span["row"] + i],
                        int(span["weight_version"]),
                        int(span["attempt"]),
                    )
        num_frames += len(frames)
    assert end is not None, "a stream ends with an end"
    assert end.num_spans == num_spans
    return cells, end, info
