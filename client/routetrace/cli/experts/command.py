"""`routetrace experts`: load of experts, simulated caches and placements."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

from routetrace.cli.arguments import AsJson, Ids, Labels, Layers, labels_of, layers_of
from routetrace.cli.connection import Connection
from routetrace.cli.errors import report_error
from routetrace.cli.experts import figures
from routetrace.cli.output import LABELS_OF, note, progress, write_json, write_table
from routetrace.client import RouteClient
from routetrace.common.errors import InvalidArgument, NotFound, RouteTraceError, counted, quoted
from routetrace.experts.analysis.report import Asked, Rows, Study, Valid, report_of
from routetrace.experts.analysis.tables import tables_of

_WORDS = "--help and docs/experts.md, The figures, explain the words"


class Request(NamedTuple):
    """Rows and model shape of one request."""

    rows: Rows
    """[n, L, K]."""
    valid: Valid | None
    """[n, L]; None: all valid."""
    layer_ids: tuple[int, ...]
    num_experts: int


def experts(
    connection: Connection,
    ids: Ids = None,
    label: Labels = None,
    everything: Annotated[bool, typer.Option("--all", help="All traces of the run.")] = False,
    npz: Annotated[
        list[Path] | None,
        typer.Option(help="File of `get`, or of ids and E, in place of a server; may be repeated."),
    ] = None,
    fit_npz: Annotated[
        list[Path] | None,
        typer.Option(help="File to learn from (default: the older half of the traces)."),
    ] = None,
    layers: Layers = None,
    capacity: Annotated[
        str | None, typer.Option(help="Cache slots per layer, such as 16,32 or 25%,50%.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Concurrent requests in a pass.")] = 1,
    passes: Annotated[int, typer.Option(min=1, help="Maximum simulated passes.")] = 2048,
    ahead: Annotated[
        int, typer.Option(min=0, help="Experts of the next layer to copy ahead; 0: none.")
    ] = 0,
    ranks: Annotated[
        int, typer.Option(min=0, help="Ranks that share the experts of a layer; 0: no placement.")
    ] = 0,
    replicas: Annotated[
        int, typer.Option(min=0, help="Extra slots for replicas of hot experts.")
    ] = 0,
    placement: Annotated[
        Path | None,
        typer.Option(help="JSON of experts by rank and slot, for all layers or per layer."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All layers and capacities, more than a screen.")
    ] = False,
    as_json: AsJson = False,
    png: Annotated[Path | None, typer.Option(help="Directory for pictures.")] = None,
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Model in pictures (default: what engines report)."),
    ] = "",
) -> None:
    """Show the load of experts, and simulate caches and placements of them.

    Cache policies and placements are fitted on the older half of the traces and measured on the
    newer half. docs/experts.md, "The figures", has more on these words:

    balanced: mean load / largest load, of experts or ranks; 1 is even.

    violation: load / mean - 1, of the most loaded expert (max), or the mean of its absolute value
    (avg); 0 is even.

    dead: experts that no token chose. entropy: of the load, / log2 of the experts; 1 is even. top
    10%: share of the load on the most loaded tenth of the experts.

    overlap: share of a token's experts that the token before it had. next layer: share of a layer's
    experts among the likeliest after the layer before it; by frequency: among the most frequent.

    lru, lfu, hazard, belady: a full cache evicts the least recently used expert, the least often
    used, the one least likely to be used soon by what traces showed, or the one needed again last.
    belady knows the future: an upper bound.

    warm start: the cache begins with the most frequent experts. copied: experts per pass and layer.
    """
    if bool(ids) + bool(label) + everything + bool(npz) != 1:
        raise typer.BadParameter("expected trace ids, --label, --all, or --npz")
    if png is not None:
        figures.check_installed()
    chosen = layers_of(layers)
    given = _placement(placement) if placement is not None else None
    if npz:
        requests = [request for path in npz for request in requests_of_file(path)]
        study = study_of(requests, len(requests), fit_npz, chosen, passes, batch)
    else:
        with connection.client() as client:
            names = list(dict.fromkeys(ids or ()))
            if not names:
                found = client.find(labels=labels_of(label or ()))
                names = [stat.trace_id for stat in found][::-1]  # oldest first
            if not names:
                connection.known_run(client)
                raise NotFound(
                    f"no matching trace in run {connection.run!r}; {LABELS_OF}"
                    if label
                    else f"run {connection.run!r} has no traces"
                )
            with progress("experts", len(names)) as done:
                engines: set[str] = set()
                answers = _requests_of_server(client, names, engines, done, as_json)
                study = study_of(answers, len(names), fit_npz, chosen, passes, batch)
            if png is not None:
                model = model or _reported_model(client, engines)
    if given is not None and given.ndim == 2:
        given = np.tile(given, (len(study.layer_ids), 1, 1))
    report = report_of(
        study,
        Asked(
            capacities=capacities_of(capacity, study.num_experts),
            ahead=ahead,
            ranks=ranks,
            replicas=replicas,
            placement=given,
        ),
    )
    if as_json:
        write_json(report)
    else:
        for at, (title, columns, rows) in enumerate(tables_of(report, full=full)):
            if at:
                print()
            if title:
                print(fill(title, 79))
            write_table(columns, rows)
        note(_WORDS if full else f"{_WORDS}; --full: all layers")
    if png is not None:
        source_rows = _names(npz) if npz else f"run {connection.run}"
        if layers is not None:
            source_rows += f", layers {layers}"
        source = figures.Source(source_rows, model, datetime.now(timezone.utc).date())
        for file in figures.draw(report, png, source):
            note(f"wrote {file}")


def study_of(
    requests: Iterable[Request],
    total: int,
    fit_files: Iterable[Path] | None,
    layer_ids: tuple[int, ...] | None,
    passes: int,
    batch: int,
) -> Study:
    """Count requests, learn from some of them and keep the rows of the others.

    Args:
        requests: up to `total` requests.
        total: expected number; the first half is learnt from. A single request is halved.
        fit_files: files to learn from in place of the first half.
        layer_ids: columns to study; None for all.
        passes: maximum simulated passes.
        batch: concurrent requests in a pass.

    Raises:
        InvalidArgument: if models differ, a layer is unknown, or no request is given.
    """
    study: Study | None = None
    first: Request | None = None

    def cut(request: Request) -> Request:
        nonlocal study, first
        if layer_ids is not None:
            unknown = sorted(set(layer_ids) - set(request.layer_ids))
            if unknown:
                raise InvalidArgument(
                    field="layer_ids", value=unknown, expected=f"ids among {request.layer_ids}"
                )
            at = [request.layer_ids.index(layer) for layer in layer_ids]
            valid = None if request.valid is None else request.valid[:, at]
            request = Request(request.rows[:, at], valid, layer_ids, request.num_experts)
        if first is None or study is None:
            first = request
            study = Study(request.layer_ids, request.num_experts, passes, batch)
        shape = (request.num_experts, request.layer_ids, request.rows.shape[2])
        if shape != (first.num_experts, first.layer_ids, first.rows.shape[2]):
            raise InvalidArgument(
                field="traces",
                value=f"top-{shape[2]} of {shape[0]} at {len(shape[1])} layers",
                expected=f"one model: top-{first.rows.shape[2]} of {first.num_experts} at "
                f"{len(first.layer_ids)} layers, as in the first trace",
            )
        return request

    apart = fit_files is not None and bool(list(fit_files))
    for at, whole in enumerate(requests):
        request = cut(whole)
        assert study is not None
        rows, valid = request.rows, request.valid
        study.count(rows, valid)
        half = len(rows) // 2
        if apart:
            study.keep(rows, valid)
        elif total == 1:
            study.learn(rows[:half], None if valid is None else valid[:half])
            study.keep(rows[half:], None if valid is None else valid[half:])
        elif at < total // 2:
            study.learn(rows, valid)
        else:
            study.keep(rows, valid)
    if study is None:
        raise InvalidArgument(field="traces", value=0, expected="at least one")
    for path in fit_files or ():
        for whole in requests_of_file(path):
            request = cut(whole)
            study.learn(request.rows, request.valid)
    return study


def requests_of_file(path: Path) -> list[Request]:
    """Read the requests of a .npz.

    The file is from `routetrace get`, or a recording: `ids` [n, L, K], `E`, and, for several
    requests, `bound` bool [n], True at the first row of each.

    Raises:
        InvalidArgument: if the file has another format.
        OSError: if the file cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if "topk_ids" in file:
                layout = json.loads(str(file["facts"]))["layout"]
                layer_ids = tuple(int(layer) for layer in file["layer_ids"])
                return [
                    Request(file["topk_ids"], file["valid"], layer_ids, int(layout["num_experts"]))
                ]
            rows, experts = file["ids"], int(file["E"])
            bound = file["bound"] if "bound" in file else np.zeros(len(rows), bool)
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgument(
            field="--npz", value=path, expected=f"a file from `get`, or ids and E: {error}"
        ) from error
    if rows.ndim != 3 or bound.shape != rows.shape[:1]:
        raise InvalidArgument(
            field="--npz", value=f"{rows.shape}, {bound.shape}", expected="ids [n, L, K], bound [n]"
        )
    cuts = [at for at in np.flatnonzero(bound).tolist() if at]
    layer_ids = tuple(range(rows.shape[1]))
    return [Request(part, None, layer_ids, experts) for part in np.split(rows, cuts)]


def capacities_of(text: str | None, num_experts: int) -> tuple[int, ...]:
    """Parse slots "16,32" or "25%,50%"; () for None.

    Raises:
        InvalidArgument: if the text has another form.
    """
    slots = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d{1,6})(%?)", part.strip())
        if match is None:
            raise InvalidArgument(
                field="--capacity",
                value=quoted(text),
                expected="slots or shares, such as 16,32 or 25%",
            )
        number = int(match[1])
        slots.append(round(number * num_experts / 100) if match[2] else number)
    return tuple(slots)


def _requests_of_server(
    client: RouteClient, names: list[str], engines: set[str], done: Any, as_json: bool
) -> Iterator[Request]:
    """Yield the rows of traces; add the engines that they are from to `engines`."""
    failed = 0
    for name, answer in zip(
        names, client.get_many(names, missing="mask", errors="return"), strict=True
    ):
        done()
        if isinstance(answer, RouteTraceError):
            failed += 1
            report_error(answer, as_json=as_json, trace_id=name)
            continue
        engines.update(answer.engine_ids)
        yield Request(answer.topk_ids, answer.valid, answer.layer_ids, answer.layout.num_experts)
    if failed:
        raise RouteTraceError(f"{failed} of {counted(len(names), 'trace')} failed")


def _reported_model(client: RouteClient, engines: Collection[str]) -> str:
    """Return the model that these engines report as an attribute; "" if none does."""
    agents = (agent for agent in client.agents() if agent.engine_id in engines)
    found = {agent.attributes.get("model", "") for agent in agents} - {""}
    # Of a path, its last part: the folders before it are of one machine.
    return " and ".join(sorted(Path(name).name if name.startswith("/") else name for name in found))


def _names(files: list[Path]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].name}{more}"


def _placement(path: Path) -> npt.NDArray[np.integer[Any]]:
    """Read a placement [R, S] or [L, R, S] from JSON."""
    try:
        slots = np.array(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise InvalidArgument(
            field="--placement", value=path, expected=f"JSON of lists of equal length: {error}"
        ) from error
    if slots.ndim not in (2, 3) or slots.dtype.kind not in "iu":
        raise InvalidArgument(
            field="--placement",
            value=f"{slots.dtype} {slots.shape}",
            expected="integers [ranks, slots] or [layers, ranks, slots]",
        )
    return slots
