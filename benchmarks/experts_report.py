"""Makes docs/experts/*.png and the tables of docs/experts.md again: `make experts-report`.

From the recordings beside the repository; where there are none, from drawn rows, which the page
then says. Each policy and placement is fitted on one recording, or one half of it, and measured on
another. Nothing here is a time: the same rows give the same files, but for the date in the
pictures.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.cli.experts import figures
from routetrace.cli.experts.command import Request, study_of
from routetrace.experts.analysis.report import Asked, Rows, Study, report_of

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
PAGE = ROOT / "docs" / "experts.md"
PICTURES = ROOT / "docs" / "experts"
_BEGIN, _END = "<!-- make experts-report: begin -->", "<!-- end -->"

# Layers of a recording that are looked at: as many, evenly spaced.
_LAYERS = 8
_PASSES = 1536
_RANKS = 8
# Requests side by side in a pass.
_BATCHES = (1, 8, 24)


class Case(NamedTuple):
    """One line of the page's tables.

    Attributes:
        name: of files.
        title: what it is.
        fit: the recording that is learnt from; "" for the first half of the other one.
        measured: the recording that is measured.
    """

    name: str
    title: str
    fit: str
    measured: str


CASES = (
    Case("real-qwen", "real small Qwen3-MoE, text -> samples", "real_qwen_text", "real_qwen_gen"),
    Case("real-dsv3", "real small DeepSeek-V3, halves of a text", "", "real_dsv3_text"),
    Case("syn-qwen3-30b", "calibrated Qwen3-30B-A3B, halves", "", "syn_qwen3_30b_1k"),
    Case("syn-dsv3", "calibrated DeepSeek-V3, halves", "", "syn_dsv3_1k"),
    Case("syn-kimi-k2", "calibrated Kimi-K2, halves", "", "syn_kimi_k2_1k"),
    Case("syn-gptoss", "calibrated gpt-oss-120b, halves", "", "syn_gptoss120b_1k"),
    Case("syn-mixtral", "calibrated Mixtral, halves", "", "syn_mixtral_1k"),
)  # fmt: skip
DRAWN = Case("drawn", "drawn rows: no recordings were at hand", "", "")


class Recording(NamedTuple):
    """Rows [n, L, K], the first one of each request, and E."""

    rows: Rows
    starts: npt.NDArray[np.bool_]
    num_experts: int


def main() -> None:
    """Write the pictures and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few passes; shows that it runs")
    parser.add_argument("--out", type=Path, default=None, help="directory, in place of docs/")
    today = datetime.now(timezone.utc).date()
    parser.add_argument("--date", type=date.fromisoformat, default=today, help="in the pictures")
    words = parser.parse_args()
    figures.check_installed()
    recorded = [case for case in CASES if (DATA / f"{case.measured}.npz").exists()]
    cases = recorded or [DRAWN]
    passes = 64 if words.quick else _PASSES
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1)) as pool:
        reports = list(pool.map(report_on, cases, [passes] * len(cases)))
    page = PAGE if words.out is None else words.out / PAGE.name
    pictures = PICTURES if words.out is None else words.out / PICTURES.name
    for case, report in zip(cases, reports, strict=True):
        rows = f"recording {case.measured}" if case.measured else "no recording"
        source = figures.Source(rows, case.title.partition(",")[0], words.date)
        figures.draw(report, pictures, source, case.name)
    text = PAGE.read_text("utf-8")
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    made = "\n".join(tables(cases, reports))
    page.write_text(f"{head}{_BEGIN}\n\n{made}\n{_END}{tail}", "utf-8")
    results = {case.name: report for case, report in zip(cases, reports, strict=True)}
    for report in results.values():  # what pictures show
        del report["load"]
        for row in report["placement"]:
            del row["rank_share"]
    (pictures / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(f"wrote {page} and {len(list(pictures.iterdir()))} files in {pictures}")


def report_on(case: Case, passes: int) -> dict[str, Any]:
    """Return the command's report on some layers of a case."""
    measured = recording(case.measured)
    layers = measured.rows.shape[1]
    chosen = sorted({round(i) for i in np.linspace(0, layers - 1, min(_LAYERS, layers))})
    half = len(measured.rows) // 2
    learn = recording(case.fit) if case.fit else Recording(*_cut(measured, 0, half))
    keep = measured if case.fit else Recording(*_cut(measured, half, len(measured.rows)))
    # All layers for load and ranks, some for caches: next layers have to be neighbours.
    requests, every = list(_requests(measured)), list(range(layers))
    study = study_at(every, passes, requests, learn, _requests(keep))
    ranks, replicas = _ranks(measured)
    placed = Asked(capacities=(1,), policies=(), ranks=ranks, replicas=replicas)
    wide = report_of(study, placed)
    some = study_at(chosen, passes, requests, learn, _spread(keep, passes))
    narrow = report_of(some, Asked())
    for part in ("cache", "warm_start"):
        wide[part] = narrow[part]
    wide["cached_layers"] = chosen
    # Neighbouring layers, a middle part of the model.
    first = max(0, layers // 2 - _LAYERS // 2)
    near = every[first : first + _LAYERS]
    few = passes // 3
    beside = study_at(near, few, [keep.rows], learn, _spread(keep, few))
    quarter = max(measured.rows.shape[2], measured.num_experts // 4)
    ahead = Asked(
        capacities=(quarter,),
        policies=("lru", "hazard"),
        ahead=measured.rows.shape[2],
    )
    wide["prefetch"] = report_of(beside, ahead)["prefetch"]
    if len(requests) > 1:
        wide["batches"] = [batch_report(measured, chosen, batch, few) for batch in _BATCHES]
    return wide


def study_at(
    layers: list[int], passes: int, counted: Iterable[Rows], learn: Recording, kept: Iterable[Rows]
) -> Study:
    """Return the figures of some layers of these requests."""
    study = Study(tuple(layers), learn.num_experts, passes)
    for rows in counted:
        study.count(rows[:, layers], None)
    study.learn(learn.rows[:, layers], None)
    for rows in kept:
        study.keep(rows[:, layers], None)
    return study


def batch_report(whole: Recording, layers: list[int], batch: int, passes: int) -> dict[str, Any]:
    """Simulate caches for a number of concurrent requests, learnt from as many.

    The recording is taken for requests of as many tokens as there are passes, so that all of them
    are under way all the time.
    """
    requests = [
        Request(request[at : at + passes, layers], None, tuple(layers), whole.num_experts)
        for request in _requests(whole)
        for at in range(0, len(request), passes)
    ]
    study = study_of(requests, len(requests), None, None, passes, batch)
    capacities = tuple(whole.num_experts * part // 4 for part in (1, 2, 3))
    found: dict[str, Any] = report_of(study, Asked(capacities=capacities))["cache"]
    return found


def recording(name: str) -> Recording:
    """A recording by its name; drawn rows for ""."""
    if name:
        with np.load(DATA / f"{name}.npz") as file:
            return Recording(file["ids"], file["bound"], int(file["E"]))
    rng = np.random.default_rng(0)
    taste = rng.normal(0, 1, (8, 64))
    now = np.zeros((8, 64))
    rows = np.empty((2048, 8, 6), np.uint8)
    for at in range(len(rows)):
        now = 0.95 * now + rng.normal(0, 0.4, now.shape)
        rows[at] = np.argsort(-(taste + now + rng.gumbel(0, 0.7, now.shape)))[:, :6]
    return Recording(rows, np.arange(2048) % 256 == 0, 64)


def _cut(whole: Recording, start: int, stop: int) -> Recording:
    return Recording(whole.rows[start:stop], whole.starts[start:stop], whole.num_experts)


def _requests(whole: Recording) -> Iterator[Rows]:
    cuts = [at for at in np.flatnonzero(whole.starts).tolist() if at]
    yield from np.split(whole.rows, cuts)


def _spread(whole: Recording, count: int) -> list[Rows]:
    """Requests with so many rows, from all over a recording: neighbours may be of one prompt."""
    requests = list(_requests(whole))
    wanted = -(-count * len(requests) // len(whole.rows))
    return requests[:: max(1, len(requests) // max(1, wanted))]


def _ranks(whole: Recording) -> tuple[int, int]:
    """Ranks, and as many replicas: one more slot on each. Fewer where experts are few."""
    ranks = min(_RANKS, whole.num_experts // 2)
    return ranks, ranks


def tables(cases: list[Case] | tuple[Case, ...], reports: list[dict[str, Any]]) -> Iterator[str]:
    """The page's tables, as lines of Markdown."""
    if cases[0] is DRAWN:
        yield "**No recordings were at hand: drawn rows, which say nothing of any model.**\n"
    balance = "balancedness", "max_violation", "avg_violation", "entropy", "dead"
    yield "### Balance\n"
    yield from _table(
        ("rows", "L, K, E", "balancedness", "max viol.", "avg viol.", "entropy", "dead", "top 10 %",
         "overlap", "next layer", "by frequency"),
        (
            (
                case.title,
                f"{len(r['layers'])}, {r['top_k']}, {r['num_experts']}",
                *(
                    f"{np.mean([layer[name] for layer in r['layers']]):.2f}"
                    for name in balance
                ),
                *(
                    f"{100 * np.mean([row[name] for row in r['layers'] if name in row]):.0f} %"
                    for name in ("top_share", "overlap", "recall_next_layer", "recall_hot")
                ),
            )
            for case, r in zip(cases, reports, strict=True)
        ),
    )  # fmt: skip
    yield "### Hit rate against capacity\n"
    names = ("lru", "lfu", "hazard", "belady")
    yield from _table(
        ("rows", "slots", "of E", *names, "hazard - lru", "copied, lru", "copied, hazard"),
        (
            (
                case.title if not at else "",
                slots,
                f"{100 * slots / r['num_experts']:.0f} %",
                *_hits(r["cache"], at),
            )
            for case, r in zip(cases, reports, strict=True)
            for at, slots in enumerate(r["cache"]["capacities"])
        ),
    )
    yield "### Warm start: the first 64 passes\n"
    yield from _table(
        ("rows", "slots", "lru", "lru, warm", "hazard", "hazard, warm", "copied, lru", "lru, warm"),
        (
            _warm(case, r, slots)
            for case, r in zip(cases, reports, strict=True)
            for slots in _middle(r)
        ),
    )
    yield "### The next layer copied ahead\n"
    yield from _table(
        ("rows", "slots", "policy", "hit rate", "with copies ahead", "copied", "with copies ahead",
         "of those ahead used"),
        (
            (
                case.title if not at else "",
                plain["capacity"],
                plain["policy"],
                f"{100 * plain['hit_rate']:.1f}",
                f"{100 * more['hit_rate']:.1f}",
                f"{plain['moved']:.2f}",
                f"{more['moved']:.2f}",
                "-" if more["ahead_used"] is None else f"{100 * more['ahead_used']:.0f} %",
            )
            for case, r in zip(cases, reports, strict=True)
            for at, (plain, more) in enumerate(
                zip(r["prefetch"][::2], r["prefetch"][1::2], strict=True)
            )
        ),
    )  # fmt: skip
    yield "### Several requests side by side\n"
    yield from _table(
        ("rows", "requests", "experts of a pass", "slots", "of E", *names, "hazard - lru",
         "copied, lru", "copied, hazard"),
        (
            (
                case.title.partition(",")[0] if not at else "",
                found["batch"] if not at else "",
                f"{found['needed']:.1f}" if not at else "",
                slots,
                f"{100 * slots / r['num_experts']:.0f} %",
                *_hits(found, at),
            )
            for case, r in zip(cases, reports, strict=True)
            for found in r.get("batches", ())
            for at, slots in enumerate(found["capacities"])
        ),
    )  # fmt: skip
    yield "### Load per rank: most loaded / mean\n"
    yield from _table(
        ("rows", "ranks", "contiguous", "round-robin", "balanced, with replicas", "replicas"),
        (
            (
                case.title,
                r["placement"][0]["ranks"],
                *(f"{row['max_over_mean']:.2f}" for row in r["placement"]),
                r["placement"][-1]["replicas"],
            )
            for case, r in zip(cases, reports, strict=True)
        ),
    )
    yield "### Pictures\n"
    for case, _ in zip(cases, reports, strict=True):
        yield f"**{case.title}**\n"
        for part, words in (("load", "load"), ("hit-rate", "hit rate"), ("ranks", "load per rank")):
            yield f"![{case.title}: {words}](experts/{case.name}-{part}.png)"
        yield ""


def _hits(cache: dict[str, Any], at: int) -> Iterator[str]:
    """Hit rates of all policies, what hazard gains, and what is copied."""
    rates, moved = cache["hit_rate"], cache["moved"]
    yield from (f"{100 * rate[at]:.1f}" for rate in rates.values())
    yield f"{100 * (rates['hazard'][at] - rates['lru'][at]):+.1f}"
    yield from (f"{moved[name][at]:.2f}" for name in ("lru", "hazard"))


def _middle(report: dict[str, Any]) -> list[int]:
    return sorted({report["cache"]["capacities"][at] for at in (2, -2)})


def _warm(case: Case, report: dict[str, Any], slots: int) -> tuple[object, ...]:
    rows = {
        (row["policy"], row["warm"]): row
        for row in report["warm_start"]["rows"]
        if row["capacity"] == slots
    }
    keys = [(policy, warm) for policy in ("lru", "hazard") for warm in (False, True)]
    return (
        case.title,
        slots,
        *(f"{100 * rows[key]['hit_rate']:.1f}" for key in keys),
        *(f"{rows[key]['moved']:.2f}" for key in keys[:2]),
    )


def _table(columns: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
    yield ""


if __name__ == "__main__":
    main()
