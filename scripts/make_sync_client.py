"""Generate the blocking client from the asyncio client.

python scripts/make_sync_client.py           write client/routetrace/client/_shells/sync.py
python scripts/make_sync_client.py --check   fail if the file is stale
"""

import re
import subprocess
import sys
from pathlib import Path

SHELLS = Path(__file__).parents[1] / "client/routetrace/client/_shells"
SOURCE, TARGET = SHELLS / "aio.py", SHELLS / "sync.py"

#: Exact texts, each of which must occur.
TEXTS = {
    '"""AsyncRouteClient: the asyncio client."""': '"""RouteClient: the blocking client.\n\n'
    'Generated from aio.py by scripts/make_sync_client.py.\n"""',
    """Reads traces from a routetrace-server, on one event loop at a time.

    Close it before a fork: gRPC's asyncio machinery does not survive one, and makes calls hang. In
    the child of a process that did not, calls raise Unavailable.
""": """Reads traces from a routetrace-server. Thread-safe.

    Usable again in a forked child. Fork while no call is under way and no asyncio client is open:
    gRPC may crash or hang in the child otherwise.
""",
}

#: Patterns, in this order.
PATTERNS = (
    (r"    # only async\n(.*\n)*?    # end of only async\n\n", ""),
    (r"\basync def\b", "def"),
    (r"\basync (with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(.*), None\]", r"Generator[\1, None, None]"),
    (r"\bAsync(\w+)\b", r"\1"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\baio_drive\b", "drive"),
    (r"\bfetch_async\b", "fetch_blocking"),
)


def generate() -> str:
    """Return the blocking client's source."""
    text = SOURCE.read_text("utf-8")
    for old, new in TEXTS.items():
        if text.count(old) != 1:
            sys.exit(f"{SOURCE.name}: expected once: {old!r}")
        text = text.replace(old, new)
    for pattern, new in PATTERNS:
        text = re.sub(pattern, new, text)
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", TARGET, "-"]
        text = subprocess.run(ruff, input=text, text=True, capture_output=True, check=True).stdout
    return text


def main() -> int:
    """Write or check; return 1 if the file is stale."""
    text = generate()
    if sys.argv[1:] != ["--check"]:
        TARGET.write_text(text, "utf-8")
        return 0
    if TARGET.read_text("utf-8") == text:
        return 0
    print(f"{TARGET.name} is stale: run python scripts/make_sync_client.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
