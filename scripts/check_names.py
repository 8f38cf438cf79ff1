"""Fail if a file has a name that the public API no longer has.

The changelog, the page on upgrading, the decisions of their time, and what runs version 0.7.0 keep
them.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Patterns of old names, and the new ones.
OLD = {
    r"\bRoutingTrace\b": "Trace",
    r"\bRankRows\b": "Rows",
    r"\bmake_plan\b": "FetchPlan.make",
    r"(?<!pb\.)(?<!pb2\.)(?<!v1\.)\bRoutingLayout\b": "ModelLayout",
    r"\blayout_from_config\b": "ModelLayout.from_config",
    r"\bModelMapError\b": "ModelNotSupported",
    r"\badd_blocks_of\b": "add_blocks",
    r"\b(linger|flush_interval|close_timeout)_s\b": "..._seconds",
    r"\buntold_requests\b": "unreported_requests",
    r"get_many\([^)\n]*\bprefetch=": "get_many(concurrency=)",
    r"\bSampleRows\.split\b": "Rows.per_sample",
    r"RouteClient\([^)\n]*\b(grpc_options|max_message_bytes)=": "ClientConfig",
    r"\bmode=\"(thread|process)\"": "background=",
}
KEPT = re.compile(
    r"^(CHANGELOG\.md|docs/upgrade\.md|docs/adr/|scripts/check_names\.py|benchmarks/ways/previous\.py)"
    r"|_pb2|\.proto$"
)
TEXT = re.compile(r"\.(py|md|toml|ya?ml|sh)$")


def main() -> int:
    """Print each old name with its file and line; return 1 if there is one."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    found = False
    for name in listed:
        path = ROOT / name
        if KEPT.search(name) or not TEXT.search(name) or not path.is_file():
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            for old, new in OLD.items():
                if re.search(old, line):
                    print(f"{name}:{number}: an old name, now {new}: {line.strip()[:80]}")
                    found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
