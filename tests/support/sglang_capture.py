"""Capture in SGLang without SGLang: passes that are launched by hand, agents that note calls."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.sglang import capture as captures
from routetrace.capture_agent.engines.sglang import seams
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

    input_embeds = multimodal_inputs = lora_id = extra_key = positional_embed_overrides = None
    bootstrap_host = bootstrap_port = bootstrap_room = None

    def __init__(self, rid, prompt, capture=True):
        self.rid, self.origin_input_ids, self.output_ids = rid, prompt, []
        self.capture = capture

    def finished(self):
        return False


class Passes:
    """A tap whose passes are launched by hand."""

    def on_forward_end(self, hook):
        self.hook = hook


def args_of(**given):
    """As much of SGLang's `ServerArgs` as is used, of the oldest version that is tested."""
    off = (
        "speculative_adaptive enable_hisparse enable_pdmux enable_two_batch_overlap "
        "enable_single_batch_overlap enable_lmcache is_embedding enable_dp_attention "
        "enable_hierarchical_cache enable_memory_saver enable_weights_cpu_backup "
        "remote_instance_weight_loader_start_seed_via_transfer_engine"
    )
    none = "speculative_algorithm speculative_eagle_topk dllm_algorithm hicache_storage_backend"
    return SimpleNamespace(
        **{
            **dict.fromkeys(off.split(), False),
            **dict.fromkeys(none.split()),
            **dict.fromkeys(("pp_size", "dp_size", "attn_cp_size"), 1),
            "disaggregation_mode": "null",
            "weight_version": "default",
            **given,
        }
    )


def has_all_names(monkeypatch):
    """Have SGLang, as far as seams see it; return the set of names that it has."""
    names = {seam.places[0] for seam in seams.table()}
    monkeypatch.setattr(seams, "_is_there", lambda name: name in names)
    monkeypatch.setattr(seams, "number", lambda: "0.5.99")
    return names


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

    def launch(*spans, slots, verifies=False, pool=None):
        """A pass of spans of (request, first position, rows); slots of cached tokens by row."""
        mode = SimpleNamespace(
            is_idle=lambda: False, is_extend=lambda: True, is_target_verify=lambda: verifies
        )
        batch = SimpleNamespace(
            reqs=[req for req, _, _ in spans],
            forward_mode=mode,
            prefix_lens=[first for _, first, _ in spans],
            extend_lens=[n for _, _, n in spans],
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((1, 9), dtype=torch.int32)),
        )
        if pool is None:
            batch.req_pool_indices_cpu = torch.zeros(len(spans), dtype=torch.int64)
        else:  # SGLang 0.5.12
            batch.req_to_token_pool.req_to_token = torch.tensor(pool)
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
