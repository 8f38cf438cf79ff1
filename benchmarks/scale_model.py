"""A model of 100 to 1,000 inference nodes at servers without disks (scale/model.py).

    python benchmarks/scale_model.py [--nodes 1000 --tokens 5000 --runs 128 --servers 128]

Without runs or servers it prints the tables of docs/scaling.md. Everything is drawn from --seed,
and nothing waits. Costs of a token are those of cli/bench/capacity.py, and beyond them those that
servers.py has measured for the object store. Partitions share nothing: each is simulated alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from routetrace.cli.bench import capacity
from scale.model import Counts, Partition, Result, Setup

#: Requests in the time of a lease: signs of life of its owner, looks of a standby.
BEATS = 4
#: Leases, beside one for each partition, between two times at which an owner reads all owners.
STEADY = 6
#: Bytes of a worker process that stands by.
STANDBY_BYTES = 75e6
HOURS_OF_MONTH = 730


@dataclass(frozen=True)
class Prices:
    """USD, as Amazon S3 has published them for us-east-1."""

    put: float = 5e-6
    """PUT or LIST."""
    get: float = 0.4e-6
    month: float = 0.023e-9
    """Byte for a month."""


@dataclass(frozen=True)
class Total:
    """Figures of a deployment."""

    setup: Setup
    results: list[Result]

    @property
    def served(self) -> float:
        """Share of tokens that are acknowledged, in the second half."""
        made = self.setup.nodes * self.setup.tokens * self.setup.costs.sent
        return self._sum("bytes_in") / made

    @property
    def busiest(self) -> float:
        """Load of the busiest core."""
        return max(result.rates.busy for result in self.results)

    def latency(self, share: float) -> float:
        """Return a quantile of the seconds until an acknowledgement."""
        found = sorted(itertools.chain(*(result.latencies for result in self.results)))
        return found[math.ceil(share * len(found)) - 1]

    def _sum(self, name: str) -> float:
        return math.fsum(getattr(result.rates, name) for result in self.results)

    @property
    def traffic(self) -> Counts:
        """Commits and reads of all servers in a second."""
        return Counts(*(self._sum(f.name) for f in fields(Counts)))

    @property
    def leases(self) -> tuple[float, float, float]:
        """PUT, LIST and GET a second that leases take, whatever the load."""
        setup = self.setup
        others, owners, beat = setup.sharing - 1, setup.servers, BEATS / setup.lease
        look = min(1, others) / setup.lease  # of an owner at the servers that stand by
        read = look * setup.sharing / (STEADY + setup.sharing)  # of chains, for their owners
        put = owners * (beat + others / setup.lease)
        return put, owners * (others * beat + look + read), owners * (others * (beat + look) + read)

    @property
    def stored(self) -> float:
        """Bytes of an hour."""
        return self._sum("bytes_in") * 3600

    def requests_usd(self, prices: Prices) -> tuple[float, float]:
        """Return the price of an hour of commits and reads, and of leases."""
        traffic, (put, listed, get) = self.traffic, self.leases
        load = traffic.puts * prices.put + traffic.gets * prices.get
        return 3600 * load, 3600 * ((put + listed) * prices.put + get * prices.get)

    @property
    def memory(self) -> float:
        """Bytes of a server, with the indexes of an hour, its cache, and workers that stand by."""
        setup, job = self.setup, capacity.Job
        traces = setup.nodes * setup.tokens * 3600 / setup.servers / job.trace_tokens
        frames = job.trace_tokens / capacity.FRAME_ROWS * capacity.FRAME_BYTES
        trace = capacity.TRACE_BYTES + job.trace_tokens * capacity.TOKEN_BYTES + frames
        engines = setup.nodes * setup.engines / setup.servers
        slots = engines * job.kv_tokens * capacity.SLOT_BYTES
        idle = (setup.sharing - 1) * STANDBY_BYTES
        return capacity.SERVER_BYTES + slots + traces * trace + setup.cache + idle


def simulate(setup: Setup) -> Total:
    """Return the figures of all partitions."""
    parts = enumerate(setup.engines_of())
    return Total(setup, [Partition(setup, n, f"{setup.seed} {i}").run() for i, n in parts])


# ---------------------------------------------------------------------------- tables


def sizes(base: Setup) -> Iterator[Total]:
    """Yield 100 to 1,000 nodes, each server with one run."""
    for nodes, tokens in itertools.product((100, 300, 1000), (5_000, 20_000)):
        setup = replace(base, nodes=nodes, tokens=tokens)
        yield simulate(replace(setup, runs=setup.needed, servers=setup.needed))


def sizing(totals: Sequence[Total]) -> Iterator[list[str]]:
    """Yield the servers of deployments."""
    yield [
        *("nodes", "tokens/s a node", "servers", "with cores 3 times as fast", "busiest core"),
        *("acknowledged after p50, p99", "memory of a server", "stored in an hour"),
    ]
    for total in totals:
        setup = total.setup
        yield [
            *(f"{setup.nodes:,}", f"{setup.tokens:,.0f}", f"{setup.servers:,}"),
            *(f"{replace(setup, core=3 * setup.core).needed:,}", f"{total.busiest:.2f}"),
            f"{total.latency(0.5):.2f}, {total.latency(0.99):.2f} s",
            *(f"{total.memory / 1e9:.1f} GB", f"{total.stored / 1e12:.1f} TB"),
        ]


def requests(totals: Sequence[Total], prices: Prices) -> Iterator[list[str]]:
    """Yield the requests of deployments, and their price."""
    yield [
        *("nodes", "tokens/s a node", "PUT/s", "GET/s", "LIST/s", "MB/s in, out"),
        *("USD/h: commits, reads", "leases", "storage"),
    ]
    for total in totals:
        setup, traffic, (put, listed, get) = total.setup, total.traffic, total.leases
        load, leases = total.requests_usd(prices)
        yield [
            *(f"{setup.nodes:,}", f"{setup.tokens:,.0f}", f"{traffic.puts + put:,.0f}"),
            *(f"{traffic.gets + get:,.0f}", f"{listed:,.0f}"),
            f"{traffic.bytes_in / 1e6:,.0f}, {traffic.bytes_out / 1e6:,.0f}",
            *(f"{load:.2f}", f"{leases:.2f}"),
            f"{total.stored * prices.month / HOURS_OF_MONTH:.2f}",
        ]


def by_runs(base: Setup) -> Iterator[list[str]]:
    """Yield the share of a job that is served, by the number of its runs."""
    yield ["runs", "servers", "placed", "busiest core", "tokens acknowledged", "after p50, p99"]
    enough = base.needed
    cases = [(runs, runs, True) for runs in (1, 4, 16, enough)]
    cases += [(enough, enough, False), (4 * enough, enough, False), (16 * enough, enough, False)]
    for runs, servers, pinned in cases:
        total = simulate(replace(base, runs=runs, servers=servers, pinned=pinned, seconds=600))
        yield [
            *(f"{runs}", f"{servers}", "`run_workers`" if pinned else "by hash"),
            *(f"{total.busiest:.2f}", f"{min(1.0, total.served):.0%}"),
            f"{total.latency(0.5):.2f}, {total.latency(0.99):.2f} s",
        ]


def killed(base: Setup) -> Iterator[list[str]]:
    """Yield the backlog after the death of a busy server, by the time of the replay."""
    yield ["tokens/s a node", "replay", "most in an agent", "drained after", "dropped"]
    for tokens, replay in itertools.product((5_000, 20_000), (2, 60, 600)):
        setup = replace(base, tokens=tokens, replay=replay, seconds=3600)
        engines = round(capacity.BUSY / (tokens / setup.engines * setup.core_seconds))
        result = Partition(setup, engines, f"{setup.seed}", killed=60.0).run()
        yield [
            *(f"{tokens:,}", f"{replay} s", f"{result.backlog / 1e6:.0f} MB"),
            *(f"{result.drained:.0f} s", f"{result.dropped / result.made:.1%}"),
        ]


def sharing(base: Setup, prices: Prices) -> Iterator[list[str]]:
    """Yield the requests of leases, by the servers that share a prefix."""
    yield ["servers of a prefix", "processes of a server", "PUT/s", "LIST/s", "GET/s", "USD/h"]
    servers = base.needed
    for count in (1, 2, 4, servers):
        total = Total(replace(base, servers=servers, sharing=count), [Result()])
        put, listed, get = total.leases
        usd = total.requests_usd(prices)[1]
        yield [
            *(f"{count}", f"{count}", f"{put:,.0f}", f"{listed:,.0f}", f"{get:,.0f}"),
            f"{usd:,.2f}",
        ]


def _show(title: str, lines: Iterator[list[str]]) -> None:
    print(f"\n{title}\n")
    for number, line in enumerate(lines):
        print(f"| {' | '.join(line)} |", flush=True)
        if not number:
            print("|---" * len(line) + "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for kind in (Setup, Prices):
        for one in fields(kind):
            if not isinstance(one.default, bool):
                name = one.name.replace("_", "-")
                parser.add_argument(f"--{name}", type=type(one.default), default=one.default)
    given = vars(parser.parse_args())

    def of(kind: Any) -> dict[str, Any]:
        return {f.name: given[f.name] for f in fields(kind) if f.name in given}

    setup, prices = Setup(**of(Setup)), Prices(**of(Prices))
    asked = setup.servers > 1 or setup.runs > 1
    totals = [simulate(setup)] if asked else [*sizes(setup)]
    _show("Servers", sizing(totals))
    _show("Requests", requests(totals, prices))
    if asked:
        return
    _show("By the number of runs", by_runs(setup))
    _show("A server dies", killed(setup))
    _show("Leases", sharing(setup, prices))


if __name__ == "__main__":
    main()
