"""Run a module of a folder here as a program: `python benchmarks/run.py areas.codec --quick`."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
