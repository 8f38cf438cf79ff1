"""Text of `routetrace-server --help`, from the settings; one style for its subcommands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize

from routetrace.common.version import installed_version
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
    usage = new_parser(
        "",
        _DESCRIPTION,
        usage="routetrace-server [--config FILE] [OPTIONS]\n"
        "       routetrace-server health|token|backup|restore [OPTIONS]",
        epilog=_EPILOG,
    )
    usage.add_argument(
        "--config", metavar="FILE", help="TOML file (default: none) [env: ROUTETRACE_CONFIG]"
    )
    for name, setting in ServerConfig.model_fields.items():
        default = _text(setting.get_default(call_default_factory=True))
        flag = f"--{name.replace('_', '-')}"
        options: dict[str, Any] = {"metavar": _metavar(name, setting.annotation)}
        if setting.annotation is bool:
            options = {"action": argparse.BooleanOptionalAction}
        env = f"{ENV_PREFIX}{name.upper()}"
        help_text = f"{setting.description} (default: {default}) [env: {env}]"
        usage.add_argument(flag, help=help_text.replace("%", "%%"), **options)
    return usage


def new_parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of the server, or of one of its subcommands, with --help and --version."""
    name = f"routetrace-server {command}".rstrip()
    parser = argparse.ArgumentParser(name, description=description, add_help=False, **options)
    parser.add_argument("-h", "--help", action="help", help="print this text and exit")
    parser.add_argument(
        "--version",
        action="version",
        version=installed_version(),
        help="print the version and exit",
    )
    return parser


def _metavar(name: str, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if kind is ByteSize:
        return "SIZE"
    if kind in (int, float):
        return "SECONDS" if name.endswith("_seconds") else "COUNT"
    if get_origin(kind) in (list, dict):
        return "JSON"
    if kind is str:
        return "URL" if name.startswith("object_") else "HOST:PORT"
    return "DIR" if name.endswith("_dir") else "FILE"


def _text(default: Any) -> str:
    """Return a default as a person writes it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, ByteSize) and default:
        return default.human_readable().replace(".0", "")
    if isinstance(default, (int, float)):
        return f"{default:,}"
    if default == "":
        return "empty"
    return str(default) if isinstance(default, (str, Path)) else "none"
