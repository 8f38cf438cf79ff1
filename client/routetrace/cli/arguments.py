"""Parsing of arguments, and options that commands share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from routetrace.cli.errors import reported, wants_json
from routetrace.cli.help import HelpGroup, choices
from routetrace.common.errors import InvalidArgument, quoted
from routetrace.common.version import installed_version

#: Options that may stand before the command, and whether each takes a value.
SHARED = {
    "--target": True,
    "--run": True,
    "--timeout": True,
    "--tls": False,
    "--ca-file": True,
    "--cert-file": True,
    "--key-file": True,
    "--server-name": True,
    "--token-file": True,
    "--json": False,
}

# Key of a context's `meta`, which all contexts of a call share.
_AS_JSON = "routetrace.cli.as_json"


class Group(HelpGroup):
    """A group of commands.

    Options that all commands share may stand before the command as well. Errors are reported here,
    as the arguments of a command may be wrong before it is called.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, with shared options moved behind the command."""
        with reported(ctx.meta.setdefault(_AS_JSON, wants_json(args))):
            left: list[str] = super().parse_args(ctx, self._moved(ctx, args))
            return left

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with reported(ctx.meta[_AS_JSON]):
            return super().invoke(ctx)

    @staticmethod
    def _moved(ctx: Any, args: list[str]) -> list[str]:
        at = 0
        while at < len(args):
            name, equals, _ = args[at].partition("=")
            if name not in SHARED:
                break
            at += 1 + (SHARED[name] and not equals)
        command, rest = args[at : at + 1], args[at + 1 :]
        if at > len(args):
            ctx.fail(f"Option {args[-1]!r} requires an argument.")
        if at and not command:
            ctx.fail("Missing command.")
        if command and not command[0].startswith("-"):
            command += args[:at]
        return [*command, *rest]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(installed_version())
        raise typer.Exit


#: `--version`, which every command has; its value is not used.
Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
]


#: `--json`, which every command has.
AsJson = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each result.")]


class PolicyChoice(str, Enum):
    """Rows of tokens that were computed more than once."""

    as_sampled = "as_sampled"
    latest = "latest"


class PrefixChoice(str, Enum):
    """Rows that stand in for KV whose own rows are unknown."""

    never = "never"
    unique = "unique"
    any = "any"
    same_version = "same_version"
    any_version = "any_version"


_POLICIES = (
    (PolicyChoice.as_sampled.value, "of the pass that sampling used"),
    (PolicyChoice.latest.value, "of the last pass"),
)
_PREFIX_SOURCES = (
    (PrefixChoice.never.value, "none; such rows are missing"),
    (PrefixChoice.unique.value, "of the only pass that computed them"),
    (PrefixChoice.any.value, "of the first such pass"),
    (PrefixChoice.same_version.value, "name of 0.8 for any"),
    (PrefixChoice.any_version.value, "name of 0.8 for any"),
)

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Trace ids.")]
SomeIds = Annotated[list[str], typer.Argument(metavar="ID", help="Trace ids.")]
OneId = Annotated[str, typer.Argument(metavar="ID", help="Trace id.")]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", help="Only traces with this label; several: with all of them."),
]
Incarnation = Annotated[
    int | None, typer.Option(help="Number of the incarnation, if a trace has several.")
]
Layers = Annotated[str | None, typer.Option(help="Absolute layer ids, such as 12-23,30.")]
Tokens = Annotated[
    str | None, typer.Option(help="Positions, such as 100:200; either may be omitted.")
]
PolicyOption = Annotated[
    PolicyChoice,
    typer.Option(help=choices("Rows of tokens that were computed more than once", _POLICIES)),
]
PrefixOption = Annotated[
    PrefixChoice,
    typer.Option(
        help=choices(
            "Rows of the same tokens and weights that stand in for a prompt's KV of unknown pass",
            _PREFIX_SOURCES,
        )
    ),
]


def labels_of(words: Sequence[str]) -> dict[str, str]:
    """Parse labels "key=value"."""
    labels = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise InvalidArgument(field="--label", value=quoted(word), expected="key=value")
        labels[key] = value
    return labels


def layers_of(text: str | None) -> tuple[int, ...] | None:
    """Parse layer ids "12-23,30"; None means all."""
    if text is None:
        return None
    ids: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        # No model has as many layers; a longer range would fill memory.
        if last < first or last - first > 10_000:
            raise InvalidArgument(
                field="--layers",
                value=quoted(text),
                expected="layer ids and ranges, such as 12-23,30",
            )
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


def tokens_of(text: str | None) -> tuple[int, int | None]:
    """Parse positions "start:stop", where either may be omitted."""
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text or ":")
    if match is None:
        raise InvalidArgument(
            field="--tokens",
            value=quoted(text),
            expected="positions start:stop, such as 100:200",
        )
    return int(match[1] or 0), int(match[2]) if match[2] else None
