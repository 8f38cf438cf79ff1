"""A batch of 512 traces of 2k tokens, fetched into one buffer, beside bare transports.

The rivals know where each byte goes: nothing to look up, to check, or to put in order. Ray has the
rows as arrays in the machine's shared memory, so that its transfer is one copy.
"""

# ray is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from measure import Table, progress, ratios, rounds, seconds
from reads.load import LAYOUT, Array, fill
from reads.rivals import Tcp, rival, serve_tcp
from reads.wire import Planes, Raw
from routetrace.client import FetchPlan, MicroBatch, Rank, RouteClient, Sample

TOKENS = 2_000


def into_one_buffer(table: Table, client: RouteClient, target: str, ids: Array) -> None:
    """Time of one fetch of the whole batch."""
    count = 16 if table.quick else 512
    with progress(f"{count} traces of {TOKENS:,} tokens"):
        names = fill(target, ids, "buffer", count, TOKENS, lanes=min(64, count))
        raw = Raw(target)
        traces = [Planes(raw.frames(name)) for name in names]
        raw.close()
    # One after the other: each rival's copy of a trace is contiguous, too.
    batch = MicroBatch.packed([Sample.of(name, TOKENS) for name in names])
    plan = FetchPlan.make(LAYOUT, batch, Rank(layer_ids=LAYOUT.layer_ids))
    ours, theirs = np.zeros(plan.shape, np.uint8), np.zeros(plan.shape, np.uint8)
    places = [theirs[:, i * TOKENS :][:, : each.rows] for i, each in enumerate(traces)]

    def fetch() -> None:
        client.fetch(plan, out=ours)

    with contextlib.ExitStack() as stack:
        peer, _ = stack.enter_context(rival(serve_tcp, [each.payload for each in traces]))
        tcp = Tcp(peer)
        stack.callback(tcp.close)
        buffer = memoryview(bytearray(max(len(each.payload) for each in traces)))

        def over_tcp() -> None:
            tcp.ask_all(range(count))
            for each, place in zip(traces, places, strict=True):
                data = buffer[: len(each.payload)]
                tcp.receive(data)
                each.decode(data, place)

        def bare() -> None:
            for each, place in zip(traces, places, strict=True):
                each.decode(memoryview(each.payload), place)

        cells = {"ours": fetch, "tcp": over_tcp, "decode": bare}
        fetch()
        over_tcp()
        assert (ours == theirs).all()
        if not table.quick:
            cells["ray"] = ray = stack.enter_context(_in_ray(places))
            for place in places:
                place[:] = 255
            ray()
            assert (ours == theirs).all()
        found = rounds(
            {name: seconds(cell) for name, cell in cells.items()}, 2 if table.quick else 8
        )
    what = f"{count} traces of 2k tokens into one buffer: time"
    against = "plain TCP of the same bytes + bare zstd"
    table.add(what, ratios(found["ours"], found["tcp"]), "x", against, "<= 1.5")
    if "ray" in found:
        shared = "ray.get of the arrays, from shared memory"
        table.add(what, ratios(found["ours"], found["ray"]), "x", shared, "<= 1")
        floor = "bare zstd of them, in memory: time"
        table.add(floor, ratios(found["decode"], found["ray"]), "x", shared)


@contextlib.contextmanager
def _in_ray(places: list[Array]) -> Iterator[Callable[[], None]]:
    """Put copies of the arrays into Ray; yield a function that gets them back into their places."""
    from ways.ray_node import ray, ray_node

    with ray_node(1, max(512 << 20, 2 * sum(place.nbytes for place in places))):
        refs = [ray.put(np.ascontiguousarray(place)) for place in places]

        def get() -> None:
            for place, array in zip(places, ray.get(refs), strict=True):
                place[:] = array

        yield get
