"""Bearer tokens: the file that says whose they are and what they cover, and new ones.

[[token]]
name = "trainer"
sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
scopes = ["read"]                  # of ingest, read, admin
runs = ["default", "exp-*"]        # names or patterns; "*" is every run
expires = 2027-01-31T00:00:00Z     # may be left out
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from routetrace.server.config import ConfigError
from routetrace.v1 import pem
from routetrace.v1.errors import Unauthenticated

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

Scope = Literal["ingest", "read", "admin"]

_SCOPES = get_args(Scope)
_KEYS = {"name", "sha256", "scopes", "runs", "expires"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@-]{1,100}", re.ASCII)
#: Seconds between two looks at the file.
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """What is known of a token; not the token."""

    name: str
    sha256: str
    scopes: frozenset[str]
    runs: tuple[str, ...]
    expires: float | None

    def covers(self, run: str) -> bool:
        """Whether it is good for a run."""
        return run in self.runs or any(fnmatch.fnmatchcase(run, runs) for runs in self.runs)


class Tokens:
    """The tokens of a file, read again when it changes.

    Raises:
        ConfigError: if the file can not be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = pem.stamp(path)
        self._tokens = read_tokens(path)
        self._look_at = 0.0

    def find(self, metadata: Iterable[tuple[str, str | bytes]]) -> Token:
        """The token that a call carries.

        Raises:
            Unauthenticated: if it carries none that is good.
        """
        held = [value for key, value in metadata if key == "authorization"]
        if len(held) != 1:
            raise _unauthenticated("the call carries none" if not held else "the call carries two")
        scheme, _, text = str(held[0]).partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthenticated("the call carries other credentials")
        # Looked up by its hash, the time that it takes tells nothing of the tokens that there are.
        digest = hashlib.sha256(text.strip().encode()).hexdigest()
        if time.monotonic() >= self._look_at:
            self._refresh()
        if digest not in self._tokens:
            self._refresh()  # it may just have been added
        token = self._tokens.get(digest)
        if token is None:
            raise _unauthenticated("that of the call is not known here")
        if token.expires is not None and token.expires <= time.time():
            raise _unauthenticated(f"token {token.name} of the call has expired")
        return token

    def _refresh(self) -> None:
        self._look_at = time.monotonic() + _LOOK_S
        stamp = pem.stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = read_tokens(self._path)
        except ConfigError as error:
            _log.error("the tokens in use are kept: %s", error)
        else:
            _log.info("%d tokens read again from %s", len(self._tokens), self._path)


def _unauthenticated(why: str) -> Unauthenticated:
    return Unauthenticated(
        f"the server asks for a bearer token: {why}",
        field="authorization",
        value="not shown",
        expected="Bearer, and a token of this server's",
    )


def read_tokens(path: Path) -> dict[str, Token]:
    """The tokens of a file, by their SHA-256.

    Raises:
        ConfigError: if the file can not be read, is not what it should be, or anybody may write it.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise ConfigError(f"tokens file {path} can be written by everybody: chmod o-w it")
            content = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokens file {path} can not be read: {error}") from None
    unknown = content.keys() - {"token"}
    entries = content.get("token")
    if unknown or not isinstance(entries, list) or not entries:
        what = f"unknown keys {', '.join(sorted(unknown))}" if unknown else "no [[token]]"
        raise ConfigError(f"tokens file {path} has {what}: expected [[token]] entries alone")
    tokens: dict[str, Token] = {}
    names: set[str] = set()
    for i, entry in enumerate(entries):
        try:
            token = _parse(entry)
            if token.name in names:
                raise ValueError(f"name is {token.name!r}: expected one that no other token has")
            if token.sha256 in tokens:
                raise ValueError(f"sha256: token {tokens[token.sha256].name} has the same")
        except ValueError as error:
            raise ConfigError(f"tokens file {path}, token {i + 1}: {error}") from None
        names.add(token.name)
        tokens[token.sha256] = token
    return tokens


def _parse(entry: Any) -> Token:
    if not isinstance(entry, dict):
        raise ValueError("expected a table")
    wrong = [f"{key} is unknown" for key in sorted(entry.keys() - _KEYS)]
    wrong += [f"{key} is missing" for key in sorted(_KEYS - {"expires"} - entry.keys())]
    if wrong:
        raise ValueError(", ".join(wrong))
    name, digest, expires = entry["name"], entry["sha256"], entry.get("expires")
    named = isinstance(name, str) and _NAME.fullmatch(name)
    _expect(named, "name", name, "1 to 100 letters, digits, . _ @ -")
    hashed = isinstance(digest, str) and _SHA256.fullmatch(digest)
    # Somebody may have put the token itself there.
    _expect(hashed, "sha256", "not shown", "64 hexadecimal digits in lower case")
    scopes = _strings(entry, "scopes")
    _expect(set(scopes) <= set(_SCOPES), "scopes", scopes, f"some of {', '.join(_SCOPES)}")
    runs = _strings(entry, "runs")
    aware = isinstance(expires, datetime) and expires.tzinfo is not None
    moment = "a date, a time and an offset, as in 2027-01-31T00:00:00Z"
    _expect(expires is None or aware, "expires", expires, moment)
    return Token(
        name, digest, frozenset(scopes), tuple(runs), expires.timestamp() if expires else None
    )


def _strings(entry: dict[str, Any], key: str) -> list[str]:
    values = entry[key]
    good = isinstance(values, list) and values and all(isinstance(v, str) and v for v in values)
    _expect(good, key, values, "a list of strings, with one at least")
    return list(values)


def _expect(good: object, key: str, value: object, expected: str) -> None:
    if not good:
        raise ValueError(f"{key} is {str(value)[:200]!r}: expected {expected}")


# ---------------------------------------------------------------------------- for people


def new_token() -> tuple[str, str]:
    """A token that nobody can guess, and its SHA-256 as the file holds it."""
    token = f"rt_{secrets.token_urlsafe(32)}"
    return token, hashlib.sha256(token.encode()).hexdigest()


def main_token(argv: Sequence[str]) -> int:
    """`routetrace-server token`: makes a token and prints its entry for the tokens file.

    Returns:
        0, or 1 if the file for the token can not be made.
    """
    parser = argparse.ArgumentParser(
        "routetrace-server token",
        description="Makes a bearer token. Prints the entry for the server's tokens file on "
        "standard output, and the token itself on standard error, or into a file.",
    )
    parser.add_argument("--name", required=True, help="what logs and errors call it")
    parser.add_argument(
        "--scope", required=True, action="append", choices=_SCOPES, help="may be given again"
    )
    parser.add_argument(
        "--run", required=True, action="append", help="run, or pattern of runs; may be given again"
    )
    parser.add_argument(
        "--expires", type=_moment, help="when it ends, such as 2027-01-31T00:00:00Z"
    )
    parser.add_argument(
        "--out", type=Path, help="new file for the token, which its owner alone can read"
    )
    args = parser.parse_args(argv)
    token, digest = new_token()
    entry = {"name": args.name, "sha256": digest, "scopes": args.scope, "runs": args.run}
    try:
        _parse(entry)
    except ValueError as error:
        parser.error(str(error))
    if args.out:
        try:
            with open(os.open(args.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token + "\n")
        except OSError as error:
            print(f"routetrace-server token: {args.out}: {error.strerror}", file=sys.stderr)
            return 1
    else:
        print(token, file=sys.stderr)
    print("[[token]]")
    for key, value in entry.items():
        print(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    if args.expires:
        print(f"expires = {args.expires.isoformat()}")
    return 0


def _moment(text: str) -> datetime:
    # Python 3.10 does not know what Z means.
    moment = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    if moment.tzinfo is None:
        raise ValueError("no offset")
    return moment
