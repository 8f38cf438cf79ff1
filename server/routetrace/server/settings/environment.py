"""Environment variables that look like settings of the server."""

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


def unknown_variables(names: Iterable[str], prefix: str, settings: Iterable[str]) -> list[str]:
    """Return the sorted variables with the prefix that are neither settings nor known."""
    known = {(prefix + name).upper() for name in settings} | _OTHER_ENV
    return sorted(
        name
        for name in names
        if name.startswith(prefix) and name not in known and not _SERVICE_ENV.fullmatch(name)
    )
