"""Memory that a server keeps for an engine that has left.

    python benchmarks/run.py scale.engines [--engines 2000] [--blocks 1000]

Engines connect, serve a request and leave; their traces expire. The growth of the server's process
for each is printed: with its slots, as the engine may come back, with its chunk, which they point
into, and with what became of its trace.
"""

from __future__ import annotations

import argparse
import tempfile
import time

from ingest.load import Agent, hello, load
from measure import rss
from routetrace.client import RouteClient
from routetrace.server.testing import run_server
from scale.lists import LAYERS

#: Engines that connect before the measurement.
_WARM = 500


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=1000, help="KV blocks of an engine")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        run_server(data_dir=directory, log_level="error", sweep_interval_seconds=1) as server,
        RouteClient(server.target, run="run") as client,
    ):

        def calm() -> int:
            while client.server_info().num_traces:
                time.sleep(0.5)
            return rss(server.pid)

        before = 0
        for number in range(_WARM + options.engines):
            if number == _WARM:
                before = calm()
            name = f"engine-{number:06}"
            agent = Agent(server.target, hello(LAYERS, "run", name, num_blocks=options.blocks))
            few = {"message_bytes": 600, "tokens": 33, "num_blocks": options.blocks}
            agent.send(load(LAYERS, 1, name=name, ttl=1, **few).messages)
            agent.close()
        grown = calm() - before
        print(f"{options.engines:,} engines, {grown / options.engines:,.0f} bytes each")


if __name__ == "__main__":
    main()
