"""Help texts: the same layout for every command, in every version of typer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from textwrap import wrap
from typing import Any

import typer.core

#: Panel of the options for the connection: one text, of `routetrace --help`, has them all.
CONNECTION = "Connection"
_POINTER = "Connection (--target, --run, --timeout, --tls, ...): see routetrace --help"

#: Names of values, by option. Others are called as the option.
METAVARS = {
    "--target": "HOST:PORT",
    "--timeout": "SECONDS",
    "--ca-file": "FILE",
    "--cert-file": "FILE",
    "--key-file": "FILE",
    "--server-name": "NAME",
    "--listen": "HOST:PORT",
    "--tls-cert": "FILE",
    "--tls-key": "FILE",
    "--token-file": "FILE",
    "--output": "PATH",
    "--label": "KEY=VALUE",
    "--layers": "RANGES",
    "--tokens": "START:STOP",
    "--missing": "ACTION",
    "--wait-for": "EVENT",
    "--prefix-rows": "SOURCE",
    "--weight-version": "VERSION",
    "--through": "VERSION",
    "--npz": "FILE",
    "--fit-npz": "FILE",
    "--placement": "FILE",
    "--png": "DIR",
    "--capacity": "SLOTS",
    "--ttl": "SECONDS",
    "--seconds": "SECONDS",
    "--update-seconds": "SECONDS",
    "--prompt": "LENGTHS",
    "--answer": "LENGTHS",
    "--core": "FACTOR",
    **dict.fromkeys(
        (
            *("--incarnation", "--position", "--layer"),
            *("--limit", "--batch", "--passes", "--ahead", "--ranks"),
            *("--replicas", "--experts", "--top-k", "--seed", "--system", "--group", "--turns"),
            *("--max-tokens", "--agents", "--steps", "--prefill", "--kv-blocks", "--drafts"),
            *("--preemptions", "--readers", "--followers", "--tokens-per-second", "--nodes"),
            *("--engines", "--kv-tokens", "--trace-tokens"),
        ),
        "N",
    ),
}

# Columns before the text of an option; longer names have a line of their own.
_NAMES_WIDTH = 26

# A space at which no line is broken.
_KEPT = "\xa0"


class _Help:
    """Writes the help of a command: arguments, options, and where those of the connection are."""

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        """Return the words of the usage behind the name of the command."""
        pieces = [self.options_metavar]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = _metavar(param) + "..." * (param.nargs == -1)
                pieces.append(name if param.required else f"[{name}]")
        return pieces

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, by panel."""
        panels: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False):
                continue
            argument = param.param_type_name == "argument"
            panel = getattr(param, "rich_help_panel", None)
            panels[panel or ("Arguments" if argument else "Options")].append(
                (_metavar(param) if argument else _names(param), _text(param))
            )
        is_command = not isinstance(self, typer.core.TyperGroup)
        connection = panels.pop(CONNECTION, []) if is_command else []
        for panel, rows in panels.items():
            _write(formatter, panel, rows)
        if connection:
            _write(formatter, "", [("", _POINTER)])


class Command(_Help, typer.core.TyperCommand):
    """A command."""

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:  # noqa: A002
        # typer keeps the line breaks of docstrings within paragraphs.
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", help) if help else help
        super().__init__(*args, help=text, **{**more, "rich_markup_mode": None})


class HelpGroup(_Help, typer.core.TyperGroup):
    """A group of commands."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "rich_markup_mode": None})

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage behind the name of the group."""
        return [*super().collect_usage_pieces(ctx), "COMMAND ..."]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, and the commands with the first paragraph of each help."""
        names = self.list_commands(ctx)
        commands = [(name, self.get_command(ctx, name)) for name in names]
        rows = [(name, str(found.help).partition("\n\n")[0]) for name, found in commands if found]
        _write(formatter, "Commands", rows)
        super().format_options(ctx, formatter)


def choices(subject: str, values: Iterable[tuple[str, str]]) -> str:
    """Return the text of an option with named values: a line for each."""
    return "\n".join([f"{subject}:", *(f"{value}: {text}" for value, text in values)])


def _metavar(param: Any) -> str:
    name = max(param.opts, key=len)
    return param.metavar or METAVARS.get(name) or name.lstrip("-").replace("-", "_").upper()


def _names(param: Any) -> str:
    names = ", ".join(sorted(param.opts, key=len))
    return names if param.is_flag else f"{names} {_metavar(param)}"


def _text(param: Any) -> str:
    """Return the text of a parameter, with its default and its variable in the first sentence."""
    first, newline, rest = (param.help or "").partition("\n")
    facts = []
    if getattr(param, "envvar", None):
        facts.append(f"env: {param.envvar}")
    if default := _default(param):
        facts.append(f"default: {default}")
    if getattr(param, "required", False) and param.param_type_name == "option":
        facts.append("required")
    if facts and first:
        text = "; ".join(fact.replace(" ", _KEPT) for fact in facts)
        first = f"{first[:-1]} ({text}){first[-1]}"
    return first + newline + rest


def _default(param: Any) -> str:
    shown, value = getattr(param, "show_default", True), param.default
    if isinstance(shown, str):
        return shown
    if not shown or param.required or callable(value):
        return ""
    if value is None or value is False or value == "":
        return ""
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:,}".removesuffix(".0") if isinstance(value, int | float) else str(value)


def _write(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Write names and texts in two columns; no word is broken."""
    start = min(max(len(name) for name, _ in rows) + 4, _NAMES_WIDTH) if any(rows[0][:1]) else 0
    lines = ["", f"{title}:"] if title else [""]
    for name, text in rows:
        first = f"  {name}" if name else ""
        if len(first) > start - 2 and name:
            lines.append(first)
            first = ""
        for number, line in enumerate(text.split("\n")):
            for part in wrap(
                line,
                formatter.width - start,
                initial_indent="  " * bool(number),
                subsequent_indent="    " * bool(number),
                break_long_words=False,
                break_on_hyphens=False,
            ):
                lines.append(f"{first:{start}}{part}".replace(_KEPT, " "))
                first = ""
    formatter.write("\n".join(lines) + "\n")
