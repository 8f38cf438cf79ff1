"""Names of settings: variables that look like one, and names that a setting no longer has."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Variables with our prefix that are not settings of the server.
_OTHER_ENV = frozenset(
    {
        "ROUTETRACE_CONFIG",
        "ROUTETRACE_TARGET",
        "ROUTETRACE_RUN",
        "ROUTETRACE_TLS",
        "ROUTETRACE_CA_FILE",
        "ROUTETRACE_CERT_FILE",
        "ROUTETRACE_KEY_FILE",
        "ROUTETRACE_SERVER_NAME",
        "ROUTETRACE_TOKEN",
        "ROUTETRACE_TOKEN_FILE",
        "ROUTETRACE_INSECURE_CLIENT",
        "ROUTETRACE_NATIVE",
        "ROUTETRACE_ENGINE_ID",
        "ROUTETRACE_VLLM",
    }
)
# Kubernetes sets these in every pod of a namespace that has a service called routetrace[-...].
_SERVICE_ENV = re.compile(
    r"ROUTETRACE(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


#: Old names of settings, and the new ones.
RENAMED = {
    "tokens": "tokens_file",
    "over_quota": "when_full",
    "max_sending_reads": "max_streaming_reads",
}


def renamed_settings(
    flags: Iterable[str], variables: Iterable[str], keys: Iterable[str], prefix: str
) -> list[str]:
    """Return an error for each old name among flags, environment variables and keys of a file."""
    given = {flag.partition("=")[0] for flag in flags} | {*variables} | {*keys}
    found = []
    for old, new in RENAMED.items():
        spelled = {
            "--" + old.replace("_", "-"): "--" + new.replace("_", "-"),
            (prefix + old).upper(): (prefix + new).upper(),
            old: new,
        }
        found += [
            f"{name} is an old name; use {spelled[name]}" for name in spelled if name in given
        ]
    return found


def unknown_variables(names: Iterable[str], prefix: str, settings: Iterable[str]) -> list[str]:
    """Return the sorted variables with the prefix that are neither settings nor known."""
    known = {(prefix + name).upper() for name in settings} | _OTHER_ENV
    return sorted(
        name
        for name in names
        if name.startswith(prefix) and name not in known and not _SERVICE_ENV.fullmatch(name)
    )
