"""Ray's way from an engine to a trainer: an actor puts each request's rows, another one gets them.

A process of its own, whose children are all that Ray starts. A round is a line on stdin,
"WAY NAME"; the answer is "over ROWS CHECK_SECONDS". First it says "ready" and the actors' process
ids, the trainer's last.
"""

# Not all of it is installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import numpy as np

from measure import HERE
from ways.ray_node import ray, ray_node


class Trainer:
    """Gets the objects whose references it receives."""

    def __init__(self) -> None:
        from ways.trainer import Checked

        self._checked = Checked()

    def take(self, refs: list[Any], session: int, rows: int) -> None:
        """A request's rows; the reference comes in a list, so that getting them is ours to do."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the store's memory is not to be written to
            tensor = torch.from_numpy(ray.get(refs[0]))
        self._checked(tensor, session, rows)

    def over(self) -> tuple[int, float]:
        """Rows of the round, and seconds that comparing them took."""
        from ways.trainer import Checked

        checked, self._checked = self._checked, Checked()
        return checked.rows, checked.seconds

    def pid(self) -> int:
        return os.getpid()


class Engine:
    """Runs rounds."""

    def __init__(self, load_json: str, rate: float, dtype: str, trainer: Any) -> None:
        from ways import engine
        from ways.load import Load

        load = Load(**json.loads(load_json))
        self._engine = engine.Engine(load, rate)
        self._idle = engine.Idle()
        self._way = engine.Slots(load, np.dtype(dtype), self._send)
        self._trainer = trainer
        self._taken: list[Any] = []

    def _send(self, _round_name: str, turn: Any, rows: Any) -> None:
        if turn.last:
            taken = self._trainer.take.remote([ray.put(rows)], turn.session, turn.rows)
            self._taken.append(taken)

    def round(self, what: str, name: str) -> None:
        self._engine.round(self._idle if what == "idle" else self._way, name)
        ray.get(self._taken)
        self._taken.clear()

    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    """See the module."""
    dtype, load_json, rate, count = sys.argv[1:]
    environment = {"env_vars": {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}}
    with ray_node(int(count) + 1, 512 << 20, environment):
        trainer = ray.remote(Trainer).options(num_cpus=1).remote()
        make = ray.remote(Engine).options(num_cpus=1).remote
        engines = [make(load_json, float(rate), dtype, trainer) for _ in range(int(count))]
        pids = ray.get([each.pid.remote() for each in [*engines, trainer]])
        print("ready", *pids, flush=True)
        for line in sys.stdin:
            ray.get([engine.round.remote(*line.split()) for engine in engines])
            print("over", *ray.get(trainer.over.remote()), flush=True)


if __name__ == "__main__":
    main()
