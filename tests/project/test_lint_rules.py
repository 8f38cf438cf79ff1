"""Each rule of `make lint` for imports and sizes fails where it is broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "server", "client", "capture_agent")
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

#: By the name of a contract in pyproject.toml: a module, and an import in it that breaks the rule.
BROKEN = {
    "The sides import down only, and never each other": (
        "client/routetrace/client/stat.py",
        "import routetrace.cli.output",
    ),
    "Server and agent know no client": (
        "capture_agent/routetrace/capture_agent/config.py",
        "import routetrace.client.stat",
    ),
    "The contract and what all sides share know no side": (
        "proto/routetrace/common/limits.py",
        "import routetrace.server.settings.config",
    ),
    "Codec, shared modules and contract import down only": (
        "proto/routetrace/common/limits.py",
        "import routetrace.codec.records",
    ),
    "Only the server reads stored messages, but not its store and its wire": (
        "client/routetrace/client/stat.py",
        "from routetrace.stored import format5_pb2",
    ),
    "The rooms of the server import down only": (
        "server/routetrace/server/index/agents.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    import routetrace.server.rows.reader",
    ),
    "The rooms of the agent import down only": (
        "capture_agent/routetrace/capture_agent/pipeline/framer.py",
        "import routetrace.capture_agent.transport.stream",
    ),
    "The rooms of the client import down only": (
        "client/routetrace/client/plan.py",
        "import routetrace.client._core.route",
    ),
    "The rooms of the page import down only": (
        "client/routetrace/page/segments.py",
        "import routetrace.page.traces",
    ),
    "Analysis and serving of experts share what is below both": (
        "capture_agent/routetrace/experts/analysis/tables.py",
        "import routetrace.experts.transformers.serving",
    ),
    "No import cycles": (
        "client/routetrace/client/micro_batch.py",
        "import routetrace.client.alignment",
    ),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources, and of what the rules are written in."""
    for source in SOURCES:
        shutil.copytree(
            ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(copy: Path) -> str:
    """Return the output of lint-imports for the copy."""
    path = os.pathsep.join(str(copy / source) for source in SOURCES)
    done = subprocess.run(
        [str(LINT_IMPORTS), "--no-cache"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_each_contract_is_broken_here_once() -> None:
    contracts = re.findall(
        r'^\[\[tool\.importlinter\.contracts\]\]\nname = "(.*)"$',
        (ROOT / "pyproject.toml").read_text("utf-8"),
        re.M,
    )
    assert [*BROKEN] == contracts


@pytest.mark.parametrize("contract", BROKEN)
def test_an_import_against_a_rule_is_named(copy: Path, contract: str) -> None:
    module, statement = BROKEN[contract]
    path = copy / module
    text = path.read_text("utf-8")
    start = "from __future__ import annotations\n"
    assert text.count(start) == 1
    path.write_text(text.replace(start, f"{start}{statement}\n"), "utf-8")
    said = lint_imports(copy)
    assert f"{contract} BROKEN" in said
    assert f".{Path(module).stem} -> " in said


def run(script: str, copy: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, f"scripts/{script}"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_module_of_more_than_400_lines_says_why(copy: Path) -> None:
    assert run("check_modules.py", copy) == (0, "")
    path = copy / "client/routetrace/client/options.py"
    text = path.read_text("utf-8")
    longer = text + "\n" * (401 - len(text.splitlines()))
    path.write_text(longer, "utf-8")
    assert run("check_modules.py", copy) == (
        1,
        "client/routetrace/client/options.py: 401 lines, at most 400 without a reason\n",
    )
    for reason, code in (("# Over 400 lines: ", 1), ("# Over 400 lines: one table", 0)):
        path.write_text(f"{reason}\n{longer}", "utf-8")
        assert run("check_modules.py", copy)[0] == code


def test_an_old_name_is_named(copy: Path) -> None:
    subprocess.run(["git", "init", "-q", "."], cwd=copy, check=True)
    (copy / "page.md").write_text("a Trace, a RoutingTraceX\n", "utf-8")
    subprocess.run(["git", "add", "-A"], cwd=copy, check=True)
    assert run("check_names.py", copy) == (0, "")
    old = "make_" + "plan"
    (copy / "page.md").write_text(f"a Trace\nof {old}\n", "utf-8")
    code, said = run("check_names.py", copy)
    assert (code, said) == (1, f"page.md:2: an old name, now FetchPlan.make: of {old}\n")
