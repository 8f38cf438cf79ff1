"""The snippets of the README and of docs/ run in their order, in a clean directory.

Those of docs/trainers.md are in test_docs.py, since they need trainers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import Security
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from support.servers.client_server import rows_of
from support.snippets import ROOT, Reader, snippets

#: Why snippets are not run, and how many of each page.
NOT_RUN = {
    "README.md": {
        "the test jobs run these": 1,
        "make test-install does": 1,
        "needs vLLM; make test-vllm runs its engines": 1,
        "needs SGLang; make test-sglang runs its schedulers": 1,
    },
    "docs/cli.md": {
        "takes minutes; README's snippets run --quick": 1,
        "runs until Ctrl-C; tests/page starts it": 1,
    },
    "docs/experts.md": {"needs a GPU": 2},
    "docs/operations.md": {
        "a server above has the port; tests/system/test_workers.py runs workers": 1,
    },
    "docs/page.md": {"runs until Ctrl-C; tests/page starts it": 1},
    "docs/reading.md": {"needs a GPU": 1},
    "docs/security.md": {"needs HAProxy; make test-neighbours runs it": 1},
    "docs/sglang.md": {
        "needs SGLang; make test-sglang runs its schedulers": 1,
        "the test jobs run these": 1,
    },
    "docs/vllm.md": {
        "make test-install does": 1,
        "needs vLLM; make test-vllm runs its engines": 5,
        "needs a GPU and docker": 1,
    },
}
PAGES = sorted(
    page
    for page in ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
    if page != "docs/trainers.md" and snippets(page)
)

#: MoE layers of the model whose routing the pages read, with the layers that they name.
LAYOUT = ModelLayout(tuple(range(12, 24)), 24, 32, 4)


def tokens_of(number: int) -> list[int]:
    """Prompt and output of a recorded trace."""
    return list(range(number, number + 111))


@contextmanager
def recorded(run: str = "default") -> Iterator[dict[str, int]]:
    """A server with the traces that pages name: g0-s0 and g0-s1, and g0-s2 of newer weights."""
    with run_server() as server:
        config = AgentConfig(server.target, "rollout-0", LAYOUT, run=run, security=Security())
        with CaptureAgent(config) as agent:
            for number, version in enumerate((40, 41, 42)):
                agent.set_weight_version(version)
                labels = {"group": "g0", "step": str(version)}
                name = f"g0-s{number}" if run == "default" else f"g17-s{number}"
                handle = agent.begin(name, prompt_len=60, labels=labels)
                agent.step(rows_of(LAYOUT, 110, number), [(handle, 0, 110)])
                agent.finish(handle, 111, token_ids=tokens_of(number))
            assert agent.flush(30)
        yield {"7411": int(server.target.rpartition(":")[2])}


@contextmanager
def nothing() -> Iterator[dict[str, int]]:
    yield {}


def readme(reader: Reader) -> None:
    """Names that the README calls the reader's own."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_moe import build_model

    sys.path.remove(str(ROOT / "examples"))
    prompts = torch.randint(1, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    reader.names |= {
        "model": build_model(num_layers=4),
        "ids": prompts,
        "mask": mask,
        "loss_of": lambda logits, ids: torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ),
    }


def reading(reader: Reader) -> None:
    """Token ids that the caller got."""
    reader.names |= {"rollouts": {"g0-s0": tokens_of(0)}}


def sglang(reader: Reader) -> None:
    """An answer of SGLang, and slime's sample."""
    handle = {"run": "default", "trace_id": "g0-s0", "num_tokens": 111}
    reader.names |= {
        "output": {"meta_info": {"routetrace": [handle]}},
        "sample": SimpleNamespace(),
    }


BEFORE: dict[str, tuple[Callable[[], Any], Callable[[Reader], None] | None]] = {
    "README.md": (nothing, readme),
    "docs/capacity.md": (lambda: recorded("grpo-17"), None),
    "docs/cli.md": (recorded, None),
    "docs/experts.md": (recorded, None),
    "docs/reading.md": (recorded, reading),
    "docs/sglang.md": (recorded, sglang),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    # tests/cli call the commands of docs/cli.md, each in a second less.
    "page",
    [pytest.param(p, marks=[pytest.mark.long] * (p == "docs/cli.md")) for p in PAGES],
)
def test_the_snippets_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    server, prepare = BEFORE.get(page, (nothing, None))
    folder = tmp_path / "clean"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("ROUTETRACE_")]:
        monkeypatch.delenv(name)
    with server() as ports:
        reader = Reader(folder, ports)
        if prepare:
            prepare(reader)
        try:
            for snippet in snippets(page):
                if not snippet.why:
                    reader.type(snippet)
        finally:
            reader.leave()


def test_snippets_that_are_not_run_say_why():
    skipped: dict[str, dict[str, int]] = {}
    for page in PAGES:
        for snippet in snippets(page):
            if snippet.why:
                of_page = skipped.setdefault(page, {})
                of_page[snippet.why] = of_page.get(snippet.why, 0) + 1
    assert skipped == NOT_RUN


def test_every_fence_of_a_language_is_a_snippet():
    """None escapes the expression that finds them."""
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        assert len(re.findall(r"^\s*```(?:python|py|sh|bash|console)\b", text, re.M)) == len(
            snippets(page)
        )


def test_a_server_line_names_its_data():
    for page in PAGES:
        for snippet in snippets(page):
            code = snippet.code.replace("\\\n", " ")
            for line in re.findall(r"^routetrace-server (?!health|token).*$", code, re.M):
                assert "--data-dir" in line, (page, line)


def test_rows_that_are_recorded_for_the_pages_can_be_told_apart():
    assert len({rows_of(LAYOUT, 5, seed).tobytes() for seed in range(3)}) == 3
    assert np.unique(rows_of(LAYOUT, 5, 0)[0, 0]).size == LAYOUT.top_k


def test_a_snippet_that_fails_names_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "clean"
    folder.mkdir()
    reader = Reader(folder)
    (first, *_) = snippets("README.md")
    with pytest.raises(AssertionError, match=rf"README.md:{first.line}: exit code 7\nwell"):
        reader.type(first._replace(kind="sh", code="echo well\nfalse || exit 7\n"))
    with pytest.raises(ZeroDivisionError) as caught:
        reader.type(first._replace(kind="python", code="\n1 / 0\n"))
    assert caught.traceback[-1].lineno == first.line + 1
