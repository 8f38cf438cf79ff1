"""Bearer tokens: the tokens file, and the command that makes one.

[[token]]
name = "trainer"
sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
scopes = ["read"]                  # of ingest, read, admin
runs = ["default", "exp-*"]        # names or patterns; "*" is every run
engines = ["node7-*"]              # names or patterns of engines to feed; default: every one
expires = 2027-01-31T00:00:00Z     # may be left out
"""

from __future__ import annotations

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

from routetrace.common import pem
from routetrace.common.errors import Unauthenticated
from routetrace.common.report_runs import reported_run
from routetrace.server.settings.config import ConfigError
from routetrace.server.settings.usage import new_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

Scope = Literal["ingest", "read", "admin"]

_SCOPES = get_args(Scope)
_KEYS = {"name", "sha256", "scopes", "runs", "engines", "expires"}
_OPTIONAL = {"engines", "expires"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@-]{1,100}", re.ASCII)
#: Seconds between two looks at the file.
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """Entry of the tokens file."""

    name: str
    sha256: str
    scopes: frozenset[str]
    runs: tuple[str, ...]
    engines: tuple[str, ...]
    expires: float | None

    def covers(self, run: str) -> bool:
        """Whether the token covers a run, or the one whose traces are reported in it."""
        return _matches(run, self.runs) or _matches(reported_run(run), self.runs)

    def covers_engine(self, engine_id: str) -> bool:
        """Whether the token covers rows of an engine."""
        return _matches(engine_id, self.engines)


class Tokens:
    """Tokens of a file, reloaded when it changes.

    Raises:
        ConfigError: if the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = pem.stamp(path)
        self._tokens = read_tokens(path)
        self._look_at = 0.0

    def find(self, metadata: Iterable[tuple[str, str | bytes]]) -> Token:
        """Return the token of a call.

        Raises:
            Unauthenticated: if the call has no valid token.
        """
        held = [value for key, value in metadata if key == "authorization"]
        if len(held) != 1:
            raise _unauthenticated("the call has none" if not held else "the call has two")
        scheme, _, text = str(held[0]).partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthenticated("the call has other credentials")
        # A look-up by hash leaks nothing about the known tokens through its duration.
        digest = hashlib.sha256(text.strip().encode()).hexdigest()
        if time.monotonic() >= self._look_at:
            self._refresh()
        if digest not in self._tokens:
            self._refresh()  # it may just have been added
        token = self._tokens.get(digest)
        if token is None:
            raise _unauthenticated("the token of the call is unknown")
        if token.expires is not None and token.expires <= time.time():
            raise _unauthenticated(f"token {token.name} has expired")
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
            _log.error("new tokens not loaded, keeping the old ones: %s", error)
        else:
            _log.info("%d tokens reloaded from %s", len(self._tokens), self._path)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return name in patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _unauthenticated(why: str) -> Unauthenticated:
    return Unauthenticated(
        f"the server asks for a bearer token: {why}",
        field="authorization",
        value="not shown",
        expected="Bearer, and a token of this server's",
    )


def read_tokens(path: Path) -> dict[str, Token]:
    """Return the tokens of a file by SHA-256.

    Raises:
        ConfigError: if the file cannot be read, is invalid, or is writable by every user.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise ConfigError(
                    f"tokens file {path} is writable by every user: run chmod o-w on it"
                )
            content = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokens file {path} cannot be read: {error}") from None
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
    wrong += [f"{key} is missing" for key in sorted(_KEYS - _OPTIONAL - entry.keys())]
    if wrong:
        raise ValueError(", ".join(wrong))
    name, digest, expires = entry["name"], entry["sha256"], entry.get("expires")
    named = isinstance(name, str) and _NAME.fullmatch(name)
    _expect(named, "name", name, "1 to 100 letters, digits, . _ @ -")
    hashed = isinstance(digest, str) and _SHA256.fullmatch(digest)
    # The value may be the token itself.
    _expect(hashed, "sha256", "not shown", "64 hexadecimal digits in lower case")
    scopes = _strings(entry, "scopes")
    _expect(set(scopes) <= set(_SCOPES), "scopes", scopes, f"some of {', '.join(_SCOPES)}")
    runs = _strings(entry, "runs")
    engines = _strings(entry, "engines") if "engines" in entry else ["*"]
    aware = isinstance(expires, datetime) and expires.tzinfo is not None
    moment = "a date, a time and an offset, as in 2027-01-31T00:00:00Z"
    _expect(expires is None or aware, "expires", expires, moment)
    until = expires.timestamp() if expires else None
    return Token(name, digest, frozenset(scopes), tuple(runs), tuple(engines), until)


def _strings(entry: dict[str, Any], key: str) -> list[str]:
    values = entry[key]
    good = isinstance(values, list) and values and all(isinstance(v, str) and v for v in values)
    _expect(good, key, values, "a list of at least one string")
    return list(values)


def _expect(good: object, key: str, value: object, expected: str) -> None:
    if not good:
        raise ValueError(f"{key} is {str(value)[:200]!r}: expected {expected}")


# ---------------------------------------------------------------------------- command


def new_token() -> tuple[str, str]:
    """Return a random token and its SHA-256 in the form of the tokens file."""
    token = f"rt_{secrets.token_urlsafe(32)}"
    return token, hashlib.sha256(token.encode()).hexdigest()


def main_token(argv: Sequence[str]) -> int:
    """Make a token and print its entry for the tokens file (`routetrace-server token`).

    Returns:
        0, or 1 if the file for the token cannot be created.
    """
    parser = new_parser(
        "token",
        "Make a bearer token. The entry for the tokens file of the server goes to standard output, "
        "the token to standard error or to the file of --out.",
    )
    parser.add_argument(
        "--name", metavar="NAME", required=True, help="name of the token in logs and errors "
        "(required)",
    )  # fmt: skip
    parser.add_argument(
        "--scope",
        required=True,
        action="append",
        choices=_SCOPES,
        help="calls that the token may make; repeatable (required)",
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        required=True,
        action="append",
        help="run, or pattern of runs such as grpo-*; repeatable (required)",
    )
    parser.add_argument(
        "--engine",
        metavar="ENGINE",
        action="append",
        help="engine to feed, or pattern of engines; repeatable (default: all)",
    )
    parser.add_argument(
        "--expires",
        metavar="TIME",
        type=_moment,
        help="time of expiry, such as 2027-01-31T00:00:00Z (default: none)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="new file for the token, readable by its owner alone (default: standard error)",
    )
    args = parser.parse_args(argv)
    token, digest = new_token()
    entry = {"name": args.name, "sha256": digest, "scopes": args.scope, "runs": args.run}
    if args.engine:
        entry["engines"] = args.engine
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
    # Python 3.10 does not parse Z.
    moment = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    if moment.tzinfo is None:
        raise ValueError("no offset")
    return moment
