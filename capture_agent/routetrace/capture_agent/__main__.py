"""`python -m routetrace.capture_agent`: says which version is installed, and what it is for."""

import argparse

from routetrace.common.version import installed_version


def main() -> None:
    """Print the version, or the help."""
    parser = argparse.ArgumentParser(
        "python -m routetrace.capture_agent",
        description="The capture agent is a library that an inference engine loads, to send the "
        "routing of its tokens to a routetrace-server. How an engine loads it: docs/vllm.md, "
        "docs/sglang.md, docs/transformers.md; docs/engines.md for an engine of your own. "
        "`routetrace agents` lists the agents of a run.",
    )
    parser.add_argument("--version", action="version", version=installed_version())
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
