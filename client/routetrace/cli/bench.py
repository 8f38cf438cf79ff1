"""`routetrace bench`: how much a deployment carries, measured and reckoned."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from routetrace.cli.capacity import Job, need_rows
from routetrace.cli.connection import Connection, connected
from routetrace.cli.load.plan import MIXES, Lengths, Load, Mix
from routetrace.cli.load.report import Progress, report_json, report_rows
from routetrace.cli.load.run import Run
from routetrace.cli.load.verdict import failures
from routetrace.cli.models import MODELS, Model, made_up
from routetrace.cli.output import say, write_table

app = typer.Typer(no_args_is_help=True, help="Measures a deployment, and reckons what one needs.")

_RUN_PREFIX = "bench-"


class MixChoice(str, Enum):
    """Mixes by name."""

    chat = "chat"
    reasoning = "reasoning"
    agentic = "agentic"
    quick = "quick"


class ReadsChoice(str, Enum):
    """How much of a session a reader reads."""

    whole = "whole"
    rank = "rank"


#: What --quick changes where nothing else is said.
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


_MIX, _ENGINES, _READERS = "Requests", "Engines", "Readers"


ModelOption = Annotated[str, typer.Option(help=f"the shape of rows: {', '.join(MODELS)}")]
Layers = Annotated[
    int, typer.Option(min=0, help="MoE layers, of a shape of its own; with the next two")
]
Experts = Annotated[int, typer.Option(min=0, help="experts a layer")]
TopK = Annotated[int, typer.Option(min=0, help="experts a token")]


@app.command("load")
@connected
def load_command(
    connection: Connection,
    quick: Annotated[bool, typer.Option("--quick", help="a bit of everything, 10 s")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="how long; 0: until --tokens  [60]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="sampled tokens; 0: until --seconds")] = 0,
    model: ModelOption = "qwen3-30b-a3b",
    layers: Layers = 0,
    experts: Experts = 0,
    top_k: TopK = 0,
    seed: Annotated[int, typer.Option(min=0, help="of everything that is random")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="writes the report there too")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="leave the traces to their ttl")] = False,
    ttl: Annotated[int, typer.Option(min=1, help="seconds that traces live in any case")] = 600,
    mix: Annotated[MixChoice | None, _option(_MIX, "what sessions are like  [chat]")] = None,
    prompt: Annotated[
        str, _option(_MIX, "lengths: 512, uniform:50:900 or lognormal:MEDIAN:SIGMA")
    ] = "",
    answer: Annotated[str, _option(_MIX, "lengths, as of the prompt")] = "",
    system: Annotated[
        int | None, _option(_MIX, "tokens that all prompts of an engine share", min=0)
    ] = None,
    group: Annotated[int | None, _option(_MIX, "samples of each prompt", min=1)] = None,
    turns: Annotated[int | None, _option(_MIX, "most turns of a session", min=1)] = None,
    max_tokens: Annotated[int, _option(_MIX, "longest session", min=1, max=1 << 20)] = 32768,
    agents: Annotated[
        int, _option(_ENGINES, "engines, each a process with its own agent", min=1, max=1024)
    ] = 2,
    batch: Annotated[
        int | None, _option(_ENGINES, "requests that an engine computes at a time  [64]", min=1)
    ] = None,
    steps: Annotated[
        float, _option(_ENGINES, "steps a second; 0: as fast as acknowledgements come", min=0)
    ] = 0.0,
    prefill: Annotated[int, _option(_ENGINES, "prompt tokens of a step, at most", min=1)] = 2048,
    kv_blocks: Annotated[int, _option(_ENGINES, "KV blocks of 16 tokens; 0: enough", min=0)] = 0,
    drafts: Annotated[
        int | None, _option(_ENGINES, "draft tokens of each decoding step  [0]", min=0, max=16)
    ] = None,
    preemptions: Annotated[
        float | None, _option(_ENGINES, "per thousand steps  [0]", min=0, max=1000)
    ] = None,
    update_seconds: Annotated[
        float | None, _option(_ENGINES, "between weight versions; 0: never  [0]", min=0)
    ] = None,
    readers: Annotated[
        int, _option(_READERS, "trainers, each a process that checks all it reads", min=0, max=1024)
    ] = 1,
    reads: Annotated[
        ReadsChoice, _option(_READERS, "whole sessions, or one rank's share (PP 4, CP 2)")
    ] = ReadsChoice.whole,
    followers: Annotated[
        int | None, _option(_READERS, "readers that follow sessions while they run  [0]", min=0)
    ] = None,
) -> None:
    """Simulated engines and trainers against the server: what it carries, and whether it is right.

    Every row that is read is compared with what the engine computed. Exits with 1 if one is wrong,
    if a read fails, or if rows are unaccounted for. The run must be empty; it is emptied at the
    end.
    """
    run = connection.run if connection.run != "default" else _RUN_PREFIX + secrets.token_hex(4)
    if not run.startswith(_RUN_PREFIX):
        raise typer.BadParameter(
            f"{run!r}: expected a run that begins with {_RUN_PREFIX!r}, whose traces may go",
            param_hint="--run",
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
    write_table(("", ""), report_rows(plan, tally))
    if json_file is not None:
        json_file.write_text(json.dumps(report_json(plan, tally), indent=1) + "\n")
    problems = list(failures(tally))
    for problem in problems:
        say(f"routetrace: {problem}")
    if problems:
        raise typer.Exit(1)


@app.command()
def capacity(
    tokens_per_second: Annotated[
        float, typer.Option(min=1, help="rows computed, prompt and answer, of all nodes")
    ],
    model: ModelOption = "qwen3-30b-a3b",
    layers: Layers = 0,
    experts: Experts = 0,
    top_k: TopK = 0,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    engines: Annotated[int, typer.Option(min=1, help="KV caches of a node")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="requests of an engine at a time")] = 256,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="slots of an engine's KV cache")
    ] = 1_000_000,
    trace_tokens: Annotated[int, typer.Option(min=1, help="of an average trace")] = 2_000,
    hours: Annotated[float, typer.Option(min=0, help="that a trace lives")] = 1.0,
    reads: Annotated[
        float, typer.Option(min=0, help="how often a row is read, all ranks taken together")
    ] = 1.0,
    core: Annotated[
        float, typer.Option(min=0.01, help="how many times as fast your cores are")
    ] = 1.0,
) -> None:
    """What a deployment needs: bytes, cores, memory, disk, and how many servers.

    Reckoned from costs that were measured on one slow core; docs/capacity.md has the formulas.
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
    write_table(("", "of one", "of all"), need_rows(job))


def _check_shape(*shape: int) -> None:
    if any(shape) and not all(shape):
        raise typer.BadParameter("expected --layers, --experts and --top-k together, or none")


def _model(name: str, *shape: int) -> Model:
    if any(shape):
        return made_up(*shape)
    if name not in MODELS:
        raise typer.BadParameter(f"{name!r}: expected {' or '.join(MODELS)}", param_hint="--model")
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
