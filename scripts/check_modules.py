"""Fail on a module of the product with over 400 lines that does not say why.

The reason is a comment line in its first 60 lines: `# Over 400 lines: <reason>`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOTS = ("proto", "server", "client", "capture_agent")
LIMIT = 400
MARK = "# Over 400 lines: "


def main() -> int:
    """Return 1 if any module is too long without a reason."""
    failed = 0
    for path in sorted(p for root in ROOTS for p in (ROOT / root).rglob("*.py")):
        if "_pb2" in path.name:
            continue
        lines = path.read_text("utf-8").splitlines()
        excused = any(line.startswith(MARK) and len(line) > len(MARK) for line in lines[:60])
        if len(lines) > LIMIT and not excused:
            failed += 1
            print(f"{path.relative_to(ROOT)}: {len(lines)} lines, at most {LIMIT} without a reason")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
