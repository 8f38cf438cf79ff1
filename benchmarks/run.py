"""Run a module of a folder here as a program: `python benchmarks/run.py areas.codec --quick`."""

import argparse
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).parent
    modules = sorted(f"areas.{path.stem}" for path in here.glob("areas/[a-z]*.py"))
    parser = argparse.ArgumentParser(
        "python benchmarks/run.py",
        description="Measure one area, or run another module of a folder here as a program.",
        epilog=f"Areas: {', '.join(modules)}. `make bench` measures all of them.",
    )
    parser.add_argument("module", metavar="MODULE", help="such as areas.codec")
    parser.add_argument("arguments", nargs="...", help="of the module; --help shows them")
    parser.parse_args()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
