"""The tree of prefixes against the definition of what it answers, request by request."""

from __future__ import annotations

import random

import pytest

from routetrace.server.index.traces.prefix_tree import PrefixTree, Reported


def requests_of(rng: random.Random) -> list[Reported]:
    """Requests that branch off each other anywhere, of 1 to 12 tokens."""
    sequences: list[list[int]] = []
    found = []
    for _ in range(rng.randint(2, 9)):
        base = rng.choice(sequences) if sequences and rng.random() < 0.8 else []
        tokens = [*base[: rng.randint(0, len(base))], *rng.choices((0, 1), k=rng.randint(1, 6))]
        sequences.append(tokens)
        ends = sorted(rng.sample(range(1, len(tokens) + 1), rng.randint(0, len(tokens))))
        ended = rng.random() < 0.7
        found.append(
            Reported(
                {at: hash(tuple(tokens[:at])) for at in ends},
                rng.randint(0, len(tokens)),
                rng.randint(1, len(tokens) + 1) if ended else 0,
                ended and rng.random() < 0.4,
            )
        )
    return found


def spread(requests: list[Reported]) -> list[dict[int, int]]:
    """Digests of each, and below each that it shares with another one, those of the other."""
    known = [dict(r.digests) for r in requests]
    changed = True
    while changed:
        changed = False
        for a in known:
            for b in known:
                shared = max((p for p in a if b.get(p) == a[p]), default=0)
                new = {p: d for p, d in b.items() if p < shared and p not in a}
                a.update(new)
                changed = changed or bool(new)
    return [dict(sorted(k.items())) for k in known]


def goes_on(later: Reported, before: Reported, shared: list[int]) -> bool:
    """Whether a request goes on from another, given the positions whose digests they share."""
    longer = later.prompt_len > before.prompt_len
    taken_over = before.handed_over and later.prompt_len == before.prompt_len
    if not longer and not (taken_over and not later.handed_over):
        return False
    given = [p for p in shared if p <= later.prompt_len]
    if before.handed_over and before.prompt_len in given:
        return True
    whole = 0 < before.prompt_len < before.num_tokens
    return whole and any(before.num_tokens <= p for p in given)


@pytest.mark.parametrize("seed", range(300))
def test_every_answer_is_that_of_the_definition(seed: int) -> None:
    requests = requests_of(random.Random(seed))
    tree, known = PrefixTree(requests), spread(requests)
    for i, (mine, request) in enumerate(zip(known, requests, strict=True)):
        assert tree.digests(i) == mine
        successor = None
        given_to: dict[int, list[int]] = {}
        handed: list[tuple[int, int]] = []
        for j, theirs in enumerate(known):
            shared = [p for p in mine if theirs.get(p) == mine[p]]
            proven = max((p for p in shared if p <= request.prompt_len), default=0)
            assert tree.shared(j, i) == proven
            if i != j and goes_on(requests[j], request, shared):
                successor = j
            before = requests[j]
            if i != j and proven > before.prompt_len > 0:
                if before.handed_over:
                    handed.append((proven, j))
                else:
                    given_to.setdefault(proven, []).append(j)
            alike = 0 < request.prompt_len == before.prompt_len in shared
            assert (j in tree.alike(i)) == alike
        for position, digest in mine.items():
            assert tree.having((position, digest)) == [
                j for j, theirs in enumerate(known) if theirs.get(position) == digest
            ]
        longest = max(given_to, default=0)
        found = given_to.get(longest, [])
        shorter = [j for p, j in handed if p >= longest > requests[j].prompt_len]
        assert tree.predecessors(i) == (longest, sorted([*found, *shorter] if found else []))
        assert tree.successor(i) == successor


def test_a_long_chain_of_turns_takes_a_tree_of_its_turns() -> None:
    count = 20_000
    turns = [
        Reported({n: n for n in (at, at + 1)}, at, at + 1, False) for at in range(1, count + 1)
    ]
    tree = PrefixTree(turns)
    assert [tree.successor(i) for i in range(count - 1)] == [count - 1] * (count - 1)
    assert tree.successor(count - 1) is None
    assert tree.predecessors(count - 1) == (count, [count - 2])
    assert tree.shared(0, count - 1) == 2
    assert tree.shared(count - 2, 9) == 10
