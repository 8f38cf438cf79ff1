"""Settings from flags, environment, file and defaults; the first one wins."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from routetrace.server.settings.config import ENV_PREFIX, ConfigError, ServerConfig
from routetrace.server.settings.environment import (
    RENAMED,
    renamed_settings,
    unknown_variables,
)
from routetrace.server.settings.mistakes import describe_mistake

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


class _LayeredConfig(ServerConfig):
    """Receive MoE routing from inference engines and serve it to trainers.

    Flags override the environment, the environment overrides the TOML file of --config (or
    ROUTETRACE_CONFIG), and the file overrides the defaults.
    """

    # Keyword arguments hold the file; pydantic puts flags before all other sources.

    _sources = ("env_settings", "init_settings")


def load_config(argv: Sequence[str]) -> ServerConfig:
    """Return settings from flags, environment (ROUTETRACE_*), a TOML file and defaults.

    Args:
        argv: flags, without the program name. `--config PATH` (or ROUTETRACE_CONFIG) names the
            file.

    Raises:
        ConfigError: if a setting is unknown or invalid.
    """
    path, flags = _take_config_flag(argv)
    path = path or os.environ.get("ROUTETRACE_CONFIG")
    values = _read_file(Path(path)) if path else {}
    if old := renamed_settings(flags, os.environ, values, ENV_PREFIX):
        raise ConfigError("; ".join(old))
    if unknown := unknown_variables(os.environ, ENV_PREFIX, ServerConfig.model_fields):
        raise ConfigError(f"unknown environment variables: {', '.join(unknown)}")
    try:
        return _LayeredConfig(_cli_parse_args=flags, **values)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError("; ".join(map(describe_mistake, error.errors()))) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def _take_config_flag(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    # The file is read before the flags are, which override it.
    path, rest = None, list(argv)
    for i, flag in enumerate(argv):
        if flag == "--config":
            if i + 1 == len(argv):
                raise ConfigError("--config: expected the path of a TOML file after it")
            path, rest = argv[i + 1], [*argv[:i], *argv[i + 2 :]]
        elif flag.startswith("--config="):
            path, rest = flag.partition("=")[2], [*argv[:i], *argv[i + 1 :]]
    return path, rest


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    unknown = values.keys() - ServerConfig.model_fields.keys() - RENAMED.keys()
    if unknown:
        raise ConfigError(f"config file {path} has unknown keys: {', '.join(sorted(unknown))}")
    return values
