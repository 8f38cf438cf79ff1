"""Signatures of the public calls: an argument that comes, goes or changes its name is seen here."""

from __future__ import annotations

import inspect

import pytest

import routetrace.capture_agent
import routetrace.client
from support.signatures import CALLS


def signature(call: object) -> str:
    """Return the names of the arguments, with * before the first that is a keyword alone."""
    words: list[str] = []
    for parameter in inspect.signature(call).parameters.values():  # type: ignore[arg-type]
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        if parameter.kind is parameter.KEYWORD_ONLY and not any(w.startswith("*") for w in words):
            words.append("*")
        words.append(stars.get(parameter.kind, "") + parameter.name)
    return " ".join(words[1:] if words[:1] == ["self"] else words)


@pytest.mark.parametrize("name", CALLS)
def test_signature(name: str) -> None:
    package, kind, call = name.split(".")
    assert signature(getattr(getattr(vars(routetrace)[package], kind), call)) == CALLS[name]


def test_every_public_call_is_listed() -> None:
    for package in (routetrace.client, routetrace.capture_agent):
        short = package.__name__.rpartition(".")[2]
        for kind in {name.split(".")[1] for name in CALLS if name.startswith(short)}:
            known = {name.rpartition(".")[2] for name in CALLS if f"{short}.{kind}." in name}
            if kind == "AsyncRouteClient":  # its other calls are those of the blocking client
                continue
            calls = {
                name
                for name, member in vars(getattr(package, kind)).items()
                if not name.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod)))
            }
            assert calls - known <= INTERNAL, kind


#: For other parts of the product.
INTERNAL = {"to_proto", "from_proto", "columns", "select"}
