"""Runs a function in several processes that talk over gloo, on loopback alone."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

Body = Callable[..., Any]


def run_ranks(world: int, body: Body, *arguments: Any, timeout: float = 100.0) -> list[Any]:
    """Return `body(rank, *arguments)` of each of `world` processes, in the order of ranks.

    Raises:
        ProcessRaisedException: if one of them raises; the others are ended.
        TimeoutError: if it takes longer than `timeout` seconds; they are ended then.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.start_processes(
            _run, (world, directory, body, arguments), world, join=False, start_method="spawn"
        )
        try:
            while not context.join(1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{world} ranks ran for more than {timeout} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [torch.load(_result(directory, rank), weights_only=False) for rank in range(world)]


def _run(rank: int, world: int, directory: str, body: Body, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    try:
        torch.save(body(rank, *arguments), _result(directory, rank))
    finally:
        dist.destroy_process_group()


def _result(directory: str, rank: int) -> Path:
    return Path(directory) / f"result-{rank}"


def all_gather_rows(
    rows: torch.Tensor, group: dist.ProcessGroup | None, sizes: list[int]
) -> torch.Tensor:
    """The rows of all ranks of a group, one rank after the other, where rank i has sizes[i]."""
    # The gather itself knows only equal sizes.
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])
