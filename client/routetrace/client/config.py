"""ClientConfig: the connection settings of a client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from routetrace.client import _arguments as check
from routetrace.common.errors import InvalidArgument, quoted, typed
from routetrace.common.limits import is_text
from routetrace.common.security import Security
from routetrace.common.target import parse_target
from routetrace.common.values import Values


class _Default(float):
    """Default of an argument, which is no number that a caller gives."""


#: Seconds of a call that is not given its own.
TIMEOUT: float = _Default(60.0)


@dataclass(frozen=True, kw_only=True)
class ClientConfig(Values):
    """Connection settings of a client; pickles with the files and the token of `security`.

    Raises:
        InvalidArgument: naming the field that is wrong.
    """

    target: str | None = None
    """host:port, host (port 7411), several with commas between, or a gRPC target;
    $ROUTETRACE_TARGET if None."""
    run: str | None = None
    """Training job of the traces; $ROUTETRACE_RUN if None, "default" without it."""
    timeout: float = TIMEOUT
    """Seconds of a call that is not given its own."""
    security: Security | Mapping[str, Any] | None = None
    """TLS files and a token, also as a mapping of the fields of `Security`; from the environment if
    None. Files are read when a client is made; its new calls use certificates that were replaced
    more than about a second before."""
    max_message_bytes: int = 64 << 20
    """Size limit of one message, in both directions."""
    grpc_options: Mapping[str, str | int] = field(default_factory=dict, hash=False)
    """Further gRPC channel options, which win over the client's own."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> ClientConfig:
        """Return the configuration of an environment.

        Args:
            environ: variables: $ROUTETRACE_TARGET, $ROUTETRACE_RUN and those of
                `Security.from_environment`; the process' environment if None.
            **overrides: fields that win over the environment.

        Raises:
            InvalidArgument: if there is no target, or a variable or a field is wrong.
        """
        known = [one.name for one in fields(cls)]
        for name in overrides:
            if name not in known:
                raise check.unknown_keyword("ClientConfig.from_env", name, known)
        environ = os.environ if environ is None else environ
        if not isinstance(environ, Mapping):
            expected = "a mapping of str to str"
            raise InvalidArgument(field="environ", value=typed(environ), expected=expected)
        given = dict(overrides)
        for name, value in _variables(environ).items():
            if given.get(name) is None:
                given[name] = value
        if given.get("security") is None:
            given["security"] = Security.from_environment(environ)
        return cls(**given)

    def __post_init__(self) -> None:
        known = _variables(os.environ)
        target = known["target"] if self.target is None else self.target
        run = known["run"] if self.run is None else self.run
        for name, value in (
            ("target", parse_target(target)),
            ("run", check.identifier("run", run)),
            ("timeout", check.seconds("timeout", self.timeout)),
            ("security", Security.of(self.security)),
            (
                "max_message_bytes",
                check.whole("max_message_bytes", self.max_message_bytes, 1, 2**31 - 1),
            ),
            ("grpc_options", _grpc_options(self.grpc_options)),
        ):
            object.__setattr__(self, name, value)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that an environment has, but for `security`."""
    return {
        "target": environ.get("ROUTETRACE_TARGET", ""),
        "run": environ.get("ROUTETRACE_RUN") or "default",
    }


def settings_of(config: ClientConfig | None, given: Mapping[str, Any]) -> ClientConfig:
    """Return the settings of a client: a configuration, or else its own arguments.

    Args:
        config: the configuration, if there is one.
        given: the other arguments.

    Raises:
        InvalidArgument: if both are given, or one of them is wrong.
    """
    given = {
        name: value
        for name, value in given.items()
        if not ((value is None and name != "timeout") or isinstance(value, _Default))
    }
    if config is None:
        return ClientConfig.from_env(**given)
    check.instance("config", config, ClientConfig, "use ClientConfig(target=...)")
    for name in given:
        raise InvalidArgument(
            field=name,
            value="given beside config",
            expected="one of them",
            remedy=f"use dataclasses.replace(config, {name}=...)",
        )
    return config


def _grpc_options(options: Any) -> dict[str, str | int]:
    """Return gRPC channel options."""
    expected = "a mapping of str to str or int"
    if not isinstance(options, Mapping):
        raise InvalidArgument(field="grpc_options", value=typed(options), expected=expected)
    for name, value in options.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        fits = is_text(value) or (number and -(2**31) <= value < 2**31)
        if not (is_text(name) and fits):
            shown = quoted(dict(options))
            raise InvalidArgument(field="grpc_options", value=shown, expected=expected)
    return dict(options)
