"""Text of `routetrace-server --help`, from the settings."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize

from routetrace.server.settings.config import ENV_PREFIX, ServerConfig

_DESCRIPTION = (
    "Receive MoE routing from inference engines and serve it to trainers. Flags override the "
    "environment, the environment overrides the TOML file of --config, and the file overrides the "
    "defaults. Sizes are written as 512MiB or 64GiB."
)
_EPILOG = (
    "`routetrace-server health --target HOST:PORT` checks a running server, `routetrace-server "
    "token` makes a bearer token, `routetrace-server backup` and `restore` copy a data directory; "
    "each has a --help of its own."
)


def parser() -> argparse.ArgumentParser:
    """Return a parser that prints --help and --version; pydantic parses the settings."""
    usage = argparse.ArgumentParser(
        "routetrace-server",
        usage="routetrace-server [--config FILE] [OPTIONS]\n"
        "       routetrace-server health|token|backup|restore [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        add_help=False,
    )
    usage.add_argument("-h", "--help", action="help", help="print this text and exit")
    add_version(usage)
    usage.add_argument("--config", metavar="FILE", help="TOML file [env: ROUTETRACE_CONFIG]")
    for name, setting in ServerConfig.model_fields.items():
        default = setting.get_default(call_default_factory=True)
        text = f"{setting.description} (default: {_text(default)})" if default else ""
        flag = f"--{name.replace('_', '-')}"
        options: dict[str, Any] = {"metavar": _metavar(name, setting.annotation)}
        if setting.annotation is bool:
            options = {"action": argparse.BooleanOptionalAction}
        help_text = f"{text or setting.description} [env: {ENV_PREFIX}{name.upper()}]"
        usage.add_argument(flag, help=help_text.replace("%", "%%"), **options)
    return usage


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add --version to a parser."""
    parser.add_argument(
        "--version",
        action="version",
        version=version("routetrace"),
        help="print the version and exit",
    )


def _metavar(name: str, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if kind is ByteSize:
        return "SIZE"
    if kind in (int, float):
        return "SECONDS" if name.endswith("_seconds") else "COUNT"
    if name.endswith("listen"):
        return "HOST:PORT"
    if get_origin(kind) in (list, dict):
        return "JSON"
    return "DIR" if name.endswith("_dir") else "FILE"


def _text(default: Any) -> str:
    text = default.human_readable() if isinstance(default, ByteSize) else str(default)
    return text.replace(".0", "") if isinstance(default, ByteSize) else text
