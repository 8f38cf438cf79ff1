"""Errors of commands, on stderr: a line for people, or with --json a line for programs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import typer

from routetrace.cli.output import note, write_json
from routetrace.common.errors import InvalidArgument, NotFound, RouteTraceError

#: Parameters of the command in progress; None before one is.
PARAMETERS: ContextVar[Collection[str] | None] = ContextVar("parameters", default=None)

# Of click, which newer versions of typer have inside.
_UsageError: Any = typer.BadParameter.__base__

# A keyword argument in a remedy of the client or the server, such as `wait_for="end"`.
_KEYWORD = re.compile(r"\b([a-z_]+)=(?:\"([^\"]*)\")?")
#: Maximum number of runs that an error names, of the server as well; one that names as many points
#: to the command that lists all.
MAX_NAMED_RUNS = 20


def describe(error: object) -> str:
    """Return an error as one line, with a remedy in options of the command line."""
    if not isinstance(error, RouteTraceError):
        return " ".join(str(error).split())
    message = " ".join(error.message.split()) or type(error).__name__
    remedy = remedy_of(error)
    if not error.remedy:
        return f"{message}; {remedy}" if remedy else message
    before, given, after = message.rpartition(error.remedy)
    return (
        (f"{before}{remedy}" if remedy else before.removesuffix("; ")) + after if given else message
    )


def remedy_of(error: Exception) -> str:
    """Return what helps against an error, "" if nothing is known."""
    remedy = in_options(getattr(error, "remedy", ""), PARAMETERS.get())
    if remedy or not (isinstance(error, NotFound) and error.kind == "run"):
        return remedy
    # Errors of the server name runs in the same way, without a remedy.
    runs = error.expected.removeprefix("one of ").split(", ")
    if runs == ["none yet"]:
        return "`routetrace runs` lists those that have traces or agents"
    return "`routetrace runs` lists all" if len(runs) >= MAX_NAMED_RUNS else ""


def in_options(remedy: str, parameters: Collection[str] | None = None) -> str:
    """Return a remedy with options in place of the keywords of Python.

    Args:
        remedy: text such as 'use wait_for="end" or missing="mask"'.
        parameters: names that the command takes; alternatives with others are left out. None: all.
    """
    text = ""
    # Alternatives, each behind its separator.
    for separator, part in re.findall(r"(^|,? or )(.*?)(?=,? or |$)", remedy):
        names = {name for name, _ in _KEYWORD.findall(part)}
        if parameters is None or names <= {*parameters}:
            text += (separator if text else "") + _KEYWORD.sub(_option, part)
    return text


def _option(keyword: re.Match[str]) -> str:
    name, value = keyword.groups()
    flag = "--" + name.replace("_", "-")
    return flag if value is None else f"{flag} {value}"


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
        "remedy": remedy_of(error),
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
    finally:
        PARAMETERS.set(None)


def wants_json(words: Sequence[str]) -> bool:
    """Return whether --json is among the words of a command, before they are parsed."""
    return "--json" in words[: words.index("--") if "--" in words else None]


def _expected(match: re.Match[str]) -> str:
    return "expected" if match[0].startswith("Input") else ""


def _field(error: Any) -> str:
    """Return the option or the argument of a usage error."""
    param = getattr(error, "param", None)
    return getattr(error, "option_name", None) or (param.opts[0] if param else "")
