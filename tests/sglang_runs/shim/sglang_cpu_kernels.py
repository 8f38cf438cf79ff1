"""Kernels of SGLang's speculation, in torch: those that its CPU build has in C++."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def assign_extend_cache_locs_cpu(
    req_pool_indices: Any, req_to_token: Any, starts: Any, ends: Any, out: Any, _width: int
) -> None:
    """Write the slots of positions [start, end) of each request to `out`, packed."""
    at = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True
    ):
        out[at : at + end - start] = req_to_token[row, start:end]
        at += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, starts: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Give positions [start, end) of each request the packed `slots`."""
    at = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True
    ):
        req_to_token[row, start:end] = slots[at : at + end - start]
        at += end - start


def fill_accept_out_cache_loc_cpu(accepted: Any, slots: Any, out: Any) -> None:
    """Write the slots of accepted nodes to `out`, packed."""
    nodes = accepted.flatten()
    nodes = nodes[nodes >= 0].long()
    out[: len(nodes)] = slots[nodes]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    seq_lens: Any,
    out: Any,
    _width: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write the slots behind each request that its drafts take to `out`, packed."""
    n = topk * num_steps
    for b, (row, start) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        out[b * n : (b + 1) * n] = req_to_token[row, start : start + n]


def fill_bonus_tokens_cpu(accepted: Any, lengths: Any, bonus: Any, stride: int) -> None:
    """Write the last accepted token of each request to `bonus`."""
    rows = torch.arange(len(lengths))
    bonus[:] = accepted.view(-1, stride)[rows, lengths.long() - 1]


def build_tree_kernel_efficient_cpu(
    _parents: Any,
    _selected: Any,
    seq_lens: Any,
    mask: Any,
    positions: Any,
    index: Any,
    next_token: Any,
    next_sibling: Any,
    topk: int,
    _depth: int,
    n: int,
    _mode: int,
) -> None:
    """Write trees without branches: each node follows the one before it."""
    assert topk == 1
    nodes = torch.arange(n)
    mask.view(-1, n, n)[:] = torch.ones(n, n).tril().bool()
    positions.view(-1, n)[:] = seq_lens[:, None] + nodes
    index[:] = torch.arange(index.numel()).view_as(index)
    next_token[:] = torch.where(nodes < n - 1, nodes + 1, -1)
    next_sibling[:] = -1


def reconstruct_indices_from_tree_mask(
    mask: Any,
    seq_lens: Any,
    positions: Any,
    index: Any,
    next_token: Any,
    next_sibling: Any,
    batch_size: int,
    n: int,
) -> None:
    """Derive positions and links of trees from the ancestors of each node."""
    for b, tree in enumerate(mask.view(batch_size, n, n).bool().tolist()):
        children: dict[int, list[int]] = {}
        for i in range(n):
            ancestors = [j for j in range(i) if tree[i][j]]
            positions[b * n + i] = seq_lens[b] + len(ancestors)
            index[b, i] = b * n + i
            next_token[b, i] = next_sibling[b, i] = -1
            if ancestors:
                children.setdefault(ancestors[-1], []).append(i)
        for parent, nodes in children.items():
            next_token[b, parent] = nodes[0]
            for node, sibling in pairwise(nodes):
                next_sibling[b, node] = sibling


def verify_tree_greedy_cpu(
    *,
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """Follow each tree along the tokens that the target samples."""
    for b in range(len(candidates)):
        node, accepted = 0, 0
        while True:
            at = int(retrive_index[b, node])
            accept_index[b, accepted] = at
            token = int(target_predict[b, node])
            predicts[at] = token
            child = int(retrive_next_token[b, node])
            while child >= 0 and int(candidates[b, child]) != token:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            node, accepted = child, accepted + 1
        accept_token_num[b] = accepted


def attend_to_trees(backend: Any, query: Any, layer: Any, forward_batch: Any) -> torch.Tensor:
    """Return the attention of draft nodes to the tokens before them and to their ancestors."""
    spec = forward_batch.spec_info
    n = spec.draft_token_num
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    lengths, mask, at = forward_batch.seq_lens.tolist(), spec.custom_mask.bool(), 0
    whole = len(mask) == sum((length + n) * n for length in lengths)  # of those before as well
    if not whole:  # requests that pad the batch of a rank have none
        mask = torch.cat([mask, mask.new_ones(len(lengths) * n * n - len(mask))])
    outputs = []
    for b, (row, length) in enumerate(
        zip(forward_batch.req_pool_indices.tolist(), lengths, strict=True)
    ):
        width = length + n if whole else n
        seen = mask[at : at + n * width].view(n, width)
        at += n * width
        if not whole:
            seen = torch.cat([torch.ones(n, length, dtype=torch.bool), seen], dim=1)
        slots = backend.req_to_token_pool.req_to_token[row, : length + n].long()
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[b * n : (b + 1) * n].movedim(0, 1).unsqueeze(0),
                keys[slots].movedim(0, 1).unsqueeze(0),
                values[slots].movedim(0, 1).unsqueeze(0),
                attn_mask=seen,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                scale=layer.scaling,
            )
            .squeeze(0)
            .movedim(1, 0)
        )
    return torch.cat(outputs).reshape(len(query), -1)


class Corpus:
    """Proposes what followed the same tokens before, as trees of several branches.

    Args:
        draft_token_num: nodes of a tree, the last known token among them.
    """

    def __init__(self, *, draft_token_num: int, **_: Any) -> None:
        self._n = draft_token_num
        self._followers: dict[tuple[int, ...], dict[int, None]] = {}

    def insert(self, batch: list[list[int]]) -> None:
        for tokens in batch:
            for at in range(1, len(tokens)):
                for width in (1, 2, 3):
                    if at >= width:
                        seen = self._followers.setdefault(tuple(tokens[at - width : at]), {})
                        seen.pop(tokens[at], None)
                        seen[tokens[at]] = None  # the latest is last

    def match_stateful(self, _: Any, batch: list[list[int]], __: Any) -> tuple[Any, Any]:
        tokens, masks = [], []
        for context in batch:
            nodes, mask = self._tree(context)
            tokens += nodes
            masks.append(mask)
        return torch.tensor(tokens).numpy(), torch.stack(masks).flatten().long().numpy()

    def _tree(self, context: list[int]) -> tuple[list[int], torch.Tensor]:
        nodes, paths = [context[-1]], [list(context[-3:])]
        mask = torch.zeros(self._n, self._n, dtype=torch.bool)
        mask[0, 0] = True
        parent = 0
        while len(nodes) < self._n and parent < len(nodes):
            found: dict[int, None] = {}
            for width in (3, 2, 1):
                found.update(self._followers.get(tuple(paths[parent][-width:]), {}))
            # The oldest first: where branches differ the right one is rarely the first.
            for token in list(found)[-3:]:
                if len(nodes) < self._n:
                    mask[len(nodes)] = mask[parent]
                    mask[len(nodes), len(nodes)] = True
                    nodes.append(token)
                    paths.append([*paths[parent], token])
            parent += 1
        while len(nodes) < self._n:  # SGLang's own pads with children of the root as well
            mask[len(nodes), 0] = mask[len(nodes), len(nodes)] = True
            nodes.append(0)
        return nodes, mask

    def synchronize(self) -> None:
        pass

    def erase_states(self, _: Any) -> None:
        pass

    def reset(self) -> None:
        self._followers.clear()
