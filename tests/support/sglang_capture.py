"""Capture in SGLang without SGLang: passes that are launched by hand, agents that note calls."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.sglang import capture as captures
from routetrace.capture_agent.engines.sglang.disaggregation import Role
from routetrace.common.layout import ModelLayout


class Agent:
    """Notes calls."""

    def __init__(self):
        self.calls = []
        self.begun = 0
        self.external = []  # of each begin

    def begin(self, request_id, **facts):
        self.begun += 1
        self.external.append(facts["num_external_tokens"])
        self.calls.append(("begin", request_id, facts["num_computed_tokens"], facts["block_ids"]))
        return 100 + self.begun

    def add_blocks(self, handles, blocks):
        self.calls.append(("add_blocks", handles.tolist(), blocks.tolist()))

    def step(self, rows, spans):
        self.calls.append(("step", rows[:, 0, 0].tolist(), spans.tolist()))

    def __getattr__(self, name):
        return lambda *args, **named: self.calls.append((name, *args, *named.values()))


class Request:
    """As much of SGLang's `Req` as is used."""

    def __init__(self, rid, prompt, capture=True):
        self.rid, self.origin_input_ids, self.output_ids = rid, prompt, []
        self.capture = capture

    def finished(self):
        return False


class Passes:
    """A tap whose passes are launched by hand."""

    def on_forward_end(self, hook):
        self.hook = hook


@contextmanager
def capturing(monkeypatch, role=Role.WHOLE):
    """Yield a capture whose agents note calls, and a function that launches a pass."""
    agents = []

    def make(config, **_):
        agents.append(Agent())
        return agents[-1]

    monkeypatch.setattr(captures, "CaptureAgent", make)
    passes = Passes()
    layout = ModelLayout((0, 2), 3, 16, 2)
    config = AgentConfig("localhost:1", "e", layout, block_size=4, num_blocks=99)
    capture = captures.Capture(passes, config, role=role)

    def launch(*spans, slots, verifies=False):
        """A pass of spans of (request, first position, rows)."""
        mode = SimpleNamespace(
            is_idle=lambda: False, is_extend=lambda: True, is_target_verify=lambda: verifies
        )
        batch = SimpleNamespace(
            reqs=[req for req, _, _ in spans],
            forward_mode=mode,
            prefix_lens=[first for _, first, _ in spans],
            extend_lens=[n for _, _, n in spans],
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((1, 9), dtype=torch.int32)),
            req_pool_indices_cpu=torch.zeros(len(spans), dtype=torch.int64),
        )
        rows = torch.tensor([[[slot % 16, 1]] * 2 for slot in slots], dtype=torch.uint8)
        forward = SimpleNamespace(forward_mode=mode)
        return capture.run(lambda: passes.hook(forward, rows, torch.tensor(slots), None), batch)

    try:
        yield SimpleNamespace(capture=capture, agents=agents, launch=launch)
    finally:
        capture.close()


def req_of(rid, n):
    req = Request(rid, list(range(n)))
    req.sampling_params = SimpleNamespace(custom_params=None)
    req.finished_reason, req.output_ids_through_stop = None, []
    return req
