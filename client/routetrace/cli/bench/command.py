"""`routetrace bench`: capacity of a deployment, measured and estimated."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated, Any

import typer

from routetrace.cli.arguments import AsJson, Group, Version
from routetrace.cli.bench.capacity import Job, need_json, need_rows
from routetrace.cli.bench.report import Progress, report_json, report_rows
from routetrace.cli.connection import Connection, connected
from routetrace.cli.help import Command, choices
from routetrace.cli.output import note, write_json, write_table
from routetrace.common.errors import InvalidArgument, quoted
from routetrace.simulation.models import MODELS, Model, custom_model
from routetrace.simulation.plan import MIXES, Lengths, Load, Mix
from routetrace.simulation.run import Run
from routetrace.simulation.verdict import failures

app = typer.Typer(
    no_args_is_help=True,
    cls=Group,
    help="Measure a deployment, or estimate the resources of one.",
)

_RUN_PREFIX = "bench-"

_READS = (("whole", "all rows"), ("rank", "share of one of 4 pipeline and 2 context ranks"))


class MixChoice(str, Enum):
    """Names of mixes."""

    chat = "chat"
    reasoning = "reasoning"
    agentic = "agentic"
    quick = "quick"


class ReadsChoice(str, Enum):
    """Part of a session that a reader reads."""

    whole = "whole"
    rank = "rank"


#: Defaults with --quick.
_QUICK: Mapping[str, Any] = {
    "mix": MixChoice.quick,
    "seconds": 8.0,
    "batch": 16,
    "drafts": 2,
    "preemptions": 5.0,
    "update_seconds": 3.0,
    "followers": 1,
}
_DEFAULTS: Mapping[str, Any] = {
    "mix": MixChoice.chat,
    "seconds": 60.0,
    "batch": 64,
    "drafts": 0,
    "preemptions": 0.0,
    "update_seconds": 0.0,
    "followers": 0,
}


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


def _models() -> Iterator[tuple[str, str]]:
    for name, model in MODELS.items():
        layout = model.layout
        layers, experts = len(layout.layer_ids), layout.num_experts
        yield name, f"{layers} MoE layers, top-{layout.top_k} of {experts} experts"


def _mixes() -> Iterator[tuple[str, str]]:
    for name, mix in MIXES.items():
        group = f", {mix.group} samples each" if mix.group > 1 else ""
        turns = f", up to {mix.turns} turns" if mix.turns > 1 else ""
        prompts = f"prompts of {mix.system:,} shared + {mix.prompt}"
        yield name, f"{prompts}, answers of {mix.answer}{group}{turns}"


_MIX, _ENGINES, _READERS = "Requests", "Engines", "Readers"


ModelOption = Annotated[str, typer.Option(help=choices("Shape of rows", _models()))]
Layers = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        show_default=False,
        help="MoE layers of a model of your own, with --experts and --top-k, in place of --model.",
    ),
]
Experts = Annotated[int, typer.Option(min=0, show_default=False, help="Experts per layer.")]
TopK = Annotated[int, typer.Option(min=0, show_default=False, help="Experts per token.")]


@app.callback()
def bench(version: Version = False) -> None:
    """Accept --version for the group."""


@app.command("load", cls=Command)
@connected
def load_command(
    connection: Connection,
    quick: Annotated[bool, typer.Option("--quick", help="Run every feature, for 8 s.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Duration; 0: until --tokens (default: 60; with --quick: 8)."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens to sample; 0: until --seconds.")
    ] = 0,
    model: ModelOption = "qwen3-30b-a3b",
    layers: Layers = 0,
    experts: Experts = 0,
    top_k: TopK = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    as_json: AsJson = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the traces to their lease.")] = False,
    ttl: Annotated[int, typer.Option(min=1, help="Lease of traces.")] = 600,
    mix: Annotated[
        MixChoice | None,
        _option(
            _MIX, choices("Sessions, in tokens (default: chat; with --quick: quick)", _mixes())
        ),
    ] = None,
    prompt: Annotated[
        str,
        _option(
            _MIX, "Lengths: 512, uniform:50:900 or lognormal:MEDIAN:SIGMA.", show_default="of --mix"
        ),
    ] = "",
    answer: Annotated[
        str, _option(_MIX, "Lengths, as for --prompt.", show_default="of --mix")
    ] = "",
    system: Annotated[
        int | None,
        _option(_MIX, "Tokens shared by all prompts of an engine.", min=0, show_default="of --mix"),
    ] = None,
    group: Annotated[
        int | None, _option(_MIX, "Samples per prompt.", min=1, show_default="of --mix")
    ] = None,
    turns: Annotated[
        int | None, _option(_MIX, "Maximum turns of a session.", min=1, show_default="of --mix")
    ] = None,
    max_tokens: Annotated[
        int, _option(_MIX, "Maximum tokens of a session.", min=1, max=1 << 20)
    ] = 32768,
    agents: Annotated[
        int, _option(_ENGINES, "Engines, one process with its own agent each.", min=1, max=1024)
    ] = 2,
    batch: Annotated[
        int | None, _option(_ENGINES, "Concurrent requests of an engine (default: 64).", min=1)
    ] = None,
    steps: Annotated[
        float, _option(_ENGINES, "Steps per second; 0: as fast as acknowledgements arrive.", min=0)
    ] = 0.0,
    prefill: Annotated[int, _option(_ENGINES, "Maximum prompt tokens per step.", min=1)] = 2048,
    kv_blocks: Annotated[int, _option(_ENGINES, "KV blocks of 16 tokens; 0: enough.", min=0)] = 0,
    drafts: Annotated[
        int | None, _option(_ENGINES, "Draft tokens per decoding step (default: 0).", min=0, max=16)
    ] = None,
    preemptions: Annotated[
        float | None,
        _option(_ENGINES, "Preemptions per 1,000 steps (default: 0).", min=0, max=1000),
    ] = None,
    update_seconds: Annotated[
        float | None,
        _option(_ENGINES, "Seconds per weight version; 0: one only (default: 0).", min=0),
    ] = None,
    readers: Annotated[
        int, _option(_READERS, "Trainers, one process each; all rows are checked.", min=0, max=1024)
    ] = 1,
    reads: Annotated[
        ReadsChoice, _option(_READERS, choices("Part of a session that is read", _READS))
    ] = ReadsChoice.whole,
    followers: Annotated[
        int | None, _option(_READERS, "Readers that follow running sessions (default: 0).", min=0)
    ] = None,
) -> None:
    """Run simulated engines and trainers against the server, and check every row.

    Every row read is compared with the one that the engine computed. Exits with 1 if a row is
    wrong, a read fails, or rows are unaccounted for. The run must be empty; its traces are deleted
    at the end.
    """
    run = connection.run if connection.run != "default" else _RUN_PREFIX + secrets.token_hex(4)
    if not run.startswith(_RUN_PREFIX):
        raise InvalidArgument(
            field="--run",
            value=quoted(run),
            expected=f"a run that begins with {_RUN_PREFIX!r}, as its traces are deleted",
        )
    _check_shape(layers, experts, top_k)
    given: dict[str, Any] = {
        "mix": mix, "seconds": seconds, "batch": batch, "drafts": drafts,
        "preemptions": preemptions, "update_seconds": update_seconds, "followers": followers,
    }  # fmt: skip
    defaults = {**_DEFAULTS, **(_QUICK if quick else {})}
    if tokens and seconds is None:
        defaults["seconds"] = 0.0
    chosen = {name: defaults[name] if value is None else value for name, value in given.items()}
    mix_name = chosen.pop("mix").value
    connection = replace(connection, run=run)
    plan = Load(
        target=connection.target,
        run=run,
        security=asdict(connection.security),
        timeout=connection.timeout,
        model="" if layers else model,
        shape=(layers, experts, top_k),
        mix=_mix(mix_name, prompt, answer, system, group, turns),
        max_tokens=max_tokens,
        agents=agents,
        prefill=prefill,
        kv_blocks=kv_blocks,
        steps_per_second=steps,
        tokens=tokens,
        readers=readers,
        reads=reads.value,
        ttl=ttl,
        keep=keep,
        seed=seed,
        **chosen,
    )
    with connection.client() as client, Progress() as progress:
        tally = Run(plan, client, progress.show)()
    if as_json:
        write_json(report_json(plan, tally))
    else:
        write_table(("", ""), report_rows(plan, tally))
    problems = list(failures(tally))
    for problem in problems:
        note(f"routetrace: {problem}")
    if problems:
        raise typer.Exit(1)


@app.command(cls=Command)
def capacity(
    tokens_per_second: Annotated[
        float, typer.Option(min=1, help="Rows computed on all nodes, for prompts and answers.")
    ],
    model: ModelOption = "qwen3-30b-a3b",
    layers: Layers = 0,
    experts: Experts = 0,
    top_k: TopK = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    engines: Annotated[int, typer.Option(min=1, help="KV caches per node.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Concurrent requests of an engine.")] = 256,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Slots of the KV cache of an engine.")
    ] = 1_000_000,
    trace_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an average trace.")] = 2_000,
    hours: Annotated[float, typer.Option(min=0, help="Lease of a trace in hours.")] = 1.0,
    reads: Annotated[
        float, typer.Option(min=0, metavar="N", help="Reads per row, summed over all ranks.")
    ] = 1.0,
    core: Annotated[
        float, typer.Option(min=0.01, help="Speed of your cores relative to the measured ones.")
    ] = 1.0,
    as_json: AsJson = False,
    _version: Version = False,
) -> None:
    """Estimate bytes, cores, memory, disk and servers of a deployment.

    Based on costs measured on one slow core; docs/capacity.md has the formulas.
    """
    _check_shape(layers, experts, top_k)
    job = Job(
        model=_model(model, layers, experts, top_k),
        tokens_per_second=tokens_per_second,
        nodes=nodes,
        engines=engines,
        batch=batch,
        kv_tokens=kv_tokens,
        trace_tokens=trace_tokens,
        hours=hours,
        reads=reads,
        core=core,
    )
    if as_json:
        write_json(need_json(job))
    else:
        write_table(("", "of one", "of all"), need_rows(job))


def _check_shape(*shape: int) -> None:
    if any(shape) and not all(shape):
        raise typer.BadParameter("expected --layers, --experts and --top-k together, or none")


def _model(name: str, *shape: int) -> Model:
    if any(shape):
        return custom_model(*shape)
    if name not in MODELS:
        raise InvalidArgument(field="--model", value=quoted(name), expected=" or ".join(MODELS))
    return MODELS[name]


def _mix(
    name: str, prompt: str, answer: str, system: int | None, group: int | None, turns: int | None
) -> Mix:
    found = MIXES[name]
    return found._replace(
        prompt=Lengths.parse(prompt) if prompt else found.prompt,
        answer=Lengths.parse(answer) if answer else found.answer,
        system=found.system if system is None else system,
        group=group or found.group,
        turns=turns or found.turns,
    )
