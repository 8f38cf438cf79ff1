"""The scripts behind `make check`, `make check-full` and `make check-newest`, and the pins."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
MAKE = """#!/bin/sh
echo "$*" >>"$MAKE_LOG"
echo "output of $1"
case "$1" in "$BROKEN") exit 3 ;; esac
"""


@pytest.fixture(name="environ")
def _environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose `make` fails for the target BROKEN, and logs its arguments."""
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    log = str(tmp_path / "log")
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MAKE_LOG": log, "BROKEN": ""}


def check(environ: dict[str, str], *words: str) -> tuple[int, str, list[str]]:
    """Exit code and output of scripts/check.py, and the command lines of make."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/check.py"), *words],
        env=environ, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, Path(environ["MAKE_LOG"]).read_text().splitlines()


def test_the_gate_runs_all_steps_with_the_printed_seed(environ: dict[str, str]) -> None:
    code, output, commands = check(environ, "gate", "--seed", "17")
    assert code == 0
    assert output.startswith("seed 17\n")
    targets = [line.split()[0] for line in commands]
    assert {*targets[:3]} == {"browser", "chromium", "vllm-env"}
    assert {*targets[3:5]} == {"lint", "compiled"}
    assert commands[5] == "test SLOW=too"
    assert sum("SEED=17" in line for line in commands) == 2
    for command in commands:
        assert re.search(rf"^== make {re.escape(command)}: \d+ s$", output, re.M)


def test_checks_of_the_same_files_have_the_same_seed(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """Otherwise, a check that fails for its seed alone could pass here and fail elsewhere."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path / "made")]

    def seed_of(text: str) -> str:
        (tmp_path / "made/scripts").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts/check.py", tmp_path / "made/scripts")
        (tmp_path / "made/text").write_text(text)
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "--allow-empty", "-m", text]):
            subprocess.run([*git, *words], check=True)
        command = [sys.executable, str(tmp_path / "made/scripts/check.py"), "gate"]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()[0]

    first, other, again = seed_of("one"), seed_of("two"), seed_of("one")
    assert first.startswith("seed ")
    assert (first == again, first == other) == (True, False)


@pytest.mark.parametrize(
    ("broken", "never"),
    [("lint", "test"), ("test", "demo"), ("demo", "test-vllm")],
)
def test_the_gate_stops_at_a_failure_and_names_the_command(
    environ: dict[str, str], broken: str, never: str
) -> None:
    code, output, commands = check({**environ, "BROKEN": broken}, "gate")
    targets = [command.split()[0] for command in commands]
    assert (code, broken in targets, never in targets) == (1, True, False)
    [command] = [command for command in commands if command.split()[0] == broken]
    assert f"step failed with exit code 3; repeat it with: make {command}\n" in output


def test_processes_of_a_target_keep_what_they_compile() -> None:
    """Also where the machine says otherwise, as images for containers do."""
    probe = 'probe: ; @echo "bytecode $${PYTHONDONTWRITEBYTECODE-is written}"'
    done = subprocess.run(
        ["make", "-s", "--no-print-directory", "--eval", probe, "probe"],
        cwd=ROOT, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "bytecode is written\n"


def test_the_reports_of_two_steps_never_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes print from threads; each write to this stream lets the other threads go first."""
    printed: list[str] = []

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            half = len(text) // 2
            printed.append(text[:half])
            time.sleep(0.001)
            printed.append(text[half:])
            return len(text)

    script = runpy.run_path(str(ROOT / "scripts/check.py"), run_name="check")
    results = [script["Result"](f"make step-{i}", i % 2, 0.0) for i in range(16)]
    outputs = [f"output of {result.command}" for result in results]
    with monkeypatch.context() as patch, ThreadPoolExecutor(16) as pool:
        patch.setattr(sys, "stdout", Slow())
        assert [*pool.map(script["report"], results, outputs)] == results
    for result in results:
        whole = f"output of {result.command}\n== {result.command}: 0 s\n"
        if result.code:
            whole += f"step failed with exit code 1; repeat it with: {result.command}\n"
        assert whole in "".join(printed)


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_the_full_check_goes_on_and_ends_with_a_table(environ: dict[str, str], jobs: str) -> None:
    broken = {**environ, "BROKEN": "test-trainers"}
    code, output, commands = check(broken, "full", "--jobs", jobs)
    assert code == 1
    assert len(commands) > 10
    for command in commands:
        assert f"output of {command.split()[0]}\n" in output
    table = output[output.index("== all steps") :].splitlines()[1:]
    assert sorted(line.split("  ")[0] for line in table) == sorted(f"make {c}" for c in commands)
    (failed,) = (line.split() for line in table if "FAILED" in line)
    assert failed[1:4] == ["test-trainers", "FAILED", "(3)"]
    assert sum(re.search(r" ok +\d+ s$", line) is not None for line in table) == len(table) - 1


@pytest.mark.parametrize("kind", ["gate", "full"])
def test_targets_of_the_checks_exist(kind: str, environ: dict[str, str]) -> None:
    _, _, commands = check(environ, kind)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in commands:
        for word in command.split():
            name, _, setting = word.partition("=")
            kind = r"\s*\?=" if setting else ":"
            assert re.search(rf"^{re.escape(name)}{kind}", makefile, re.M), word


# ---------------------------------------------------------------------------- Chromium

BROWSER = "#!/bin/sh\n[ $# = 0 ] || [ $1 = --version ]\n"
LEFT_OUT = "Chromium is not there and cannot be installed here: the tests of the page did not run\n"


@pytest.fixture(name="bare")
def _bare(tmp_path: Path) -> Path:
    """The only folder of PATH, without a Chromium: root, and an apt-get that logs and fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "sh", "echo"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    _program(folder / "id", "#!/bin/sh\necho 0\n")
    _program(folder / "apt-get", '#!/bin/sh\necho "$*" >>"${0%/*}/../apt"\nexit 100\n')
    return folder


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def chromium_env(bare: Path, *words: str, **more: str) -> tuple[int, str, str]:
    """Exit code, output and errors of scripts/chromium_env.sh before a command."""
    done = subprocess.run(
        [shutil.which("bash") or "bash", ROOT / "scripts/chromium_env.sh", *words,
         "sh", "-c", 'echo "found $CHROMIUM"'],
        env={"PATH": str(bare), **more}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_without_chromium_only_the_gate_goes_on_and_says_so(bare: Path) -> None:
    assert chromium_env(bare, "--where-possible") == (0, LEFT_OUT, "")
    code, output, errors = chromium_env(bare)
    assert (code, output) == (2, "")
    assert "apt-get install chromium as root, or make CHROMIUM=PATH\n" in errors
    assert (bare.parent / "apt").read_text("utf-8").count(" chromium\n") == 2


def test_only_root_installs_chromium(bare: Path) -> None:
    _program(bare / "id", "#!/bin/sh\necho 1000\n")
    assert chromium_env(bare, "--where-possible") == (0, LEFT_OUT, "")
    assert not (bare.parent / "apt").exists()


def test_chromium_is_installed_by_its_name(bare: Path) -> None:
    """And not again."""
    _program(bare / "chromium-to-come", BROWSER)
    _program(
        bare / "apt-get",
        '#!/bin/sh\necho "$*" >>"${0%/*}/../apt"\n'
        'case "$*" in *"install -y --no-install-recommends chromium") '
        f'{shutil.which("mv")} "${{0%/*}}/chromium-to-come" "${{0%/*}}/chromium" ;; esac\n',
    )
    for _ in range(2):
        assert chromium_env(bare) == (0, f"found {bare}/chromium\n", "")
    assert len((bare.parent / "apt").read_text("utf-8").splitlines()) == 2


@pytest.mark.parametrize("words", [(), ("--where-possible",)])
def test_a_chromium_that_does_not_run_is_an_error(bare: Path, words: tuple[str, ...]) -> None:
    for named in (str(bare / "no-chromium"), ""):
        _program(bare / "chromium", "#!/bin/sh\nexit 1\n")
        code, output, errors = chromium_env(bare, *words, CHROMIUM=named)
        assert (code, output) == (2, "")
        assert f"{named or bare / 'chromium'} does not run" in errors


# ---------------------------------------------------------------------------- pins


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    lines = (line for line in requirements if line.strip() and not line.startswith("#"))
    return {canonical(re.split(r"[\s\[><=;]", line)[0]) for line in lines}


def pins(name: str) -> set[str]:
    return names((ROOT / f"constraints/{name}.txt").read_text("utf-8").splitlines())


def test_all_packages_of_the_environments_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]

    def extra(name: str) -> set[str]:
        found = names(extras[name] + project["dependencies"])
        for line in extras[name]:
            for inner in re.findall(r"routetrace\[([\w,]+)\]", line):
                found |= set().union(*map(extra, inner.split(",")))
        return found - {"routetrace"}

    for name, of in (
        ("dev", "dev"),
        ("bench", "bench"),
        ("trainers", "server"),
        ("vllm", "server"),
    ):
        assert extra(of) <= pins(name), name
    for path in (ROOT / "constraints").glob("*.in"):
        assert names(path.read_text("utf-8").splitlines()) <= pins(path.stem), path.name


def test_pins_are_versions_and_name_no_index() -> None:
    for path in (ROOT / "constraints").glob("*.txt"):
        for line in path.read_text("utf-8").splitlines():
            assert re.fullmatch(r"[\w.-]+==[\w.+!]+( ; [^/]+)?", line), f"{path.name}: {line}"
    assert "torch" not in set().union(*map(pins, ("dev", "bench", "trainers", "vllm", "sglang")))


def test_the_newest_versions_are_compared_with_their_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("newest", ROOT / "scripts/newest.py")
    assert spec is not None
    assert spec.loader is not None
    newest: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(newest)
    monkeypatch.setattr(newest, "ROOT", tmp_path)
    (tmp_path / "constraints").mkdir()
    for name in ("dev", "trainers", "vllm"):
        pinned = "numpy==2.2.6 ; python_full_version < '3.11'\nnumpy==2.4.6 ; x\nRuff_x==1.0\n"
        (tmp_path / f"constraints/{name}.txt").write_text(pinned)
    # Makes an environment whose python lists packages; the target test-trainers fails.
    (tmp_path / "make").write_text(
        '#!/bin/sh\nfor word in "$@"; do case "$word" in *VENV=*) folder=${word#*=} ;; esac; done\n'
        "mkdir -p $folder/bin\n"
        "printf '#!/bin/sh\\necho numpy==2.4.6\\necho ruff-x==1.1\\necho other==3\\n'"
        " >$folder/bin/python\n"
        'chmod +x $folder/bin/python\n[ "$1" = PINS= ] || exit 9\n'
        'case "$*" in *test-trainers*) exit 2 ;; esac\n'
    )
    (tmp_path / "make").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert newest.main() == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert ["ruff-x", "1.0", "1.1", "ok"] in lines
    assert ["ruff-x", "1.0", "1.1", "test-trainers", "FAILED"] in lines
    assert not [line for line in lines if line[0] in ("numpy", "other")]
    assert [line[3] for line in lines if line[0] == "make"] == [
        "test",
        "demo",
        "test-trainers",
        "test-vllm",
    ]
