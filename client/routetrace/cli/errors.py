"""Errors of commands, on stderr: a line for people, or with --json a line for programs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from routetrace.cli.output import describe, note, write_json
from routetrace.common.errors import InvalidArgument, RouteTraceError

# Of click, which newer versions of typer have inside.
_UsageError: Any = typer.BadParameter.__base__


def report_error(error: Exception, *, as_json: bool, trace_id: str = "") -> None:
    """Print an error, of one trace if the command goes on with others."""
    if as_json:
        write_json(error_json(error) | ({"trace_id": trace_id} if trace_id else {}), error=True)
    else:
        note(f"routetrace: {trace_id and f'{trace_id}: '}{describe(error)}")


def error_json(error: Exception) -> dict[str, str]:
    """Return the fields of an error, "" where they do not apply."""
    return {
        "error": type(error).__name__,
        "message": describe(error),
        "field": getattr(error, "field", ""),
        "remedy": getattr(error, "remedy", ""),
    }


@contextlib.contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Report an error of the block, and exit with 1, or 2 for an argument that was refused."""
    try:
        yield
    except InvalidArgument as error:
        report_error(error, as_json=as_json)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # the reader of the output closed it
        raise
    except (RouteTraceError, OSError) as error:
        report_error(error, as_json=as_json)
        raise typer.Exit(1) from None
    except _UsageError as error:
        # Of pydantic, which newer versions of typer parse values with.
        error.message = re.sub(
            "^(Value error, |Input should be(?= ))", _expected, str(error.message or "")
        )
        if not as_json:  # typer shows the usage as well
            raise
        report_error(InvalidArgument(error.format_message(), field=_field(error)), as_json=True)
        raise typer.Exit(2) from None


def wants_json(words: Sequence[str]) -> bool:
    """Return whether --json is among the words of a command, before they are parsed."""
    return "--json" in words[: words.index("--") if "--" in words else None]


def _expected(match: re.Match[str]) -> str:
    return "expected" if match[0].startswith("Input") else ""


def _field(error: Any) -> str:
    """Return the option or the argument of a usage error."""
    param = getattr(error, "param", None)
    return getattr(error, "option_name", None) or (param.opts[0] if param else "")
