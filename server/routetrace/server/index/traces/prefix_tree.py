"""Tree of the token prefixes that the requests of one trace report.

A digest stands for all tokens before its position, so the prefixes of one token sequence form a
chain, and the chains of all requests a tree: requests that begin alike share a path. Its size is
that of the reports, however many requests go on from each other; each question takes a time that
grows with the logarithm of its depth.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Generator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from routetrace.server.common.slices import at_once

Digests = dict[int, int]
"""Position -> digest of the tokens before it; ascending."""

Prefix = tuple[int, int]
"""(position, digest): the tokens of a sequence before a position."""

_ROOT = 0

#: Longer than any prompt.
FAR = 1 << 40

#: Requests, or prefixes, of one step.
STEP = 64

#: Prefixes that are sorted at once.
_SORTED = 1 << 10


class Reported(NamedTuple):
    """Facts of one request that decide who goes on from whom."""

    digests: Digests
    prompt_len: int
    num_tokens: int
    """Final token count; 0 while unknown."""
    handed_over: bool


class PrefixTree:
    """Prefixes of requests, which go by their index."""

    def __init__(self, requests: Sequence[Reported]) -> None:
        at_once(self._make(requests))

    @classmethod
    def in_steps(cls, requests: Sequence[Reported]) -> Generator[None, None, PrefixTree]:
        """Make a tree step by step."""
        tree = cls.__new__(cls)
        yield from tree._make(requests)
        return tree

    def _make(self, requests: Sequence[Reported]) -> Generator[None, None, None]:
        self._requests = requests
        shorter = yield from _next_shorter([r.digests for r in requests if r.digests])
        prefixes: list[Prefix] = [(-1, 0)]
        prefixes += yield from sorted_in_steps(shorter)  # shorter ones come first
        self._prefixes = prefixes
        self._number = {}
        self._parent = []
        for node, prefix in enumerate(prefixes):
            self._number[prefix] = node
            self._parent.append(self._number[shorter.get(prefix) or prefixes[_ROOT]])
            if not node % STEP:
                yield
        yield from self._link()
        self._leaf: list[int] = []
        self._given: list[int] = []
        self._alike: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            digests = request.digests
            leaf = self._number[next(reversed(digests.items()))] if digests else _ROOT
            self._leaf.append(leaf)
            given = self._at(leaf, request.prompt_len)
            self._given.append(given)
            if 0 < request.prompt_len == prefixes[given][0]:
                self._alike.setdefault(given, []).append(index)
            if not len(self._leaf) % STEP:
                yield
        yield from self._arrange()
        yield from self._find_newest()
        yield from self._find_sampled()

    def _link(self) -> Generator[None, None, None]:
        """Set depths, and for each node an ancestor to jump to, which makes a climb logarithmic."""
        parent = self._parent
        self._depth = depth = [0] * len(parent)
        self._jump = jump = [_ROOT] * len(parent)
        for node in range(1, len(parent)):
            up = parent[node]
            depth[node] = depth[up] + 1
            far = jump[up]
            even = depth[up] - depth[far] == depth[far] - depth[jump[far]]
            jump[node] = jump[far] if even else up
            if not node % STEP:
                yield

    def _arrange(self) -> Generator[None, None, None]:
        """Order the requests such that those with a prefix are a range."""
        count = [0] * len(self._parent)
        for leaf in self._leaf:
            count[leaf] += 1
        own = [*count]
        for node in range(len(count) - 1, 0, -1):
            count[self._parent[node]] += count[node]
            if not node % STEP:
                yield
        first, free = [0] * len(count), [0] * len(count)
        free[_ROOT] = own[_ROOT]
        for node in range(1, len(count)):
            up = self._parent[node]
            first[node] = free[up]
            free[up] += count[node]
            free[node] = first[node] + own[node]
            if not node % STEP:
                yield
        self._range = [(at, at + n) for at, n in zip(first, count, strict=True)]
        self._order = [0] * len(self._leaf)
        for index, leaf in enumerate(self._leaf):
            self._order[first[leaf]] = index
            first[leaf] += 1
            if not index % STEP:
                yield

    def _find_newest(self) -> Generator[None, None, None]:
        """Set the newest request whose prompt has each prefix, and of which more is known.

        The second one was given more tokens than the prefix, or sampled after it.
        """
        size = len(self._parent)
        self._newest, self._further = [-1] * size, [-1] * size
        for index, (node, request) in enumerate(zip(self._given, self._requests, strict=True)):
            self._newest[node] = index
            if not request.handed_over or request.prompt_len > self._prefixes[node][0]:
                self._further[node] = index
            if not index % STEP:
                yield
        for node in range(size - 1, 0, -1):
            up, newest = self._parent[node], self._newest[node]
            self._newest[up] = max(self._newest[up], newest)
            self._further[up] = max(self._further[up], newest)
            if not node % STEP:
                yield
        # The longest prefix of each that is one of some prompt.
        self._prompted = prompted = [_ROOT] * size
        for node in range(1, size):
            prompted[node] = node if self._newest[node] >= 0 else prompted[self._parent[node]]
            if not node % STEP:
                yield

    def _find_sampled(self) -> Generator[None, None, None]:
        """Set the longest part of each prefix that ends with tokens which some request sampled.

        Such a request has the part, and a shorter prompt. The two shortest prompts of the requests
        with a prefix say whether there is one, and whether there are several; those that ended with
        `handoff` count for themselves.
        """
        size = len(self._parent)
        self._shortest = shortest = [(FAR, FAR)] * size
        self._handed_over = handed_over = [FAR] * size
        self._sampler = sampler = [-1] * size
        for index, (node, request) in enumerate(zip(self._leaf, self._requests, strict=True)):
            if request.prompt_len and request.handed_over:
                handed_over[node] = min(handed_over[node], request.prompt_len)
            elif request.prompt_len:
                if request.prompt_len < shortest[node][0]:
                    sampler[node] = index
                shortest[node] = _least(shortest[node], (request.prompt_len, FAR))
            if not index % STEP:
                yield
        for node in range(size - 1, 0, -1):
            up = self._parent[node]
            if shortest[node][0] < shortest[up][0]:
                sampler[up] = sampler[node]
            shortest[up] = _least(shortest[up], shortest[node])
            handed_over[up] = min(handed_over[up], handed_over[node])
            if not node % STEP:
                yield
        self._sampled = sampled = [_ROOT] * size
        for node in range(1, size):
            mine = shortest[node][0] < self._prefixes[node][0]
            sampled[node] = node if mine else sampled[self._parent[node]]
            if not node % STEP:
                yield

    def _at(self, node: int, position: int) -> int:
        """Return the longest prefix of a node that ends at or before a position."""
        prefixes, parent, jump = self._prefixes, self._parent, self._jump
        while prefixes[node][0] > position:
            node = jump[node] if prefixes[jump[node]][0] > position else parent[node]
        return node

    def _among(self, node: int) -> list[int]:
        start, stop = self._range[node]
        return self._order[start:stop]

    # ------------------------------------------------------------------ questions

    def digests(self, index: int) -> Digests:
        """Return the digests of a request, with those of others that have the same tokens."""
        chain = []
        node = self._leaf[index]
        while node != _ROOT:
            chain.append(self._prefixes[node])
            node = self._parent[node]
        return dict(reversed(chain))

    def having(self, prefix: Prefix) -> list[int]:
        """Return the requests with a prefix, in order."""
        node = self._number.get(prefix, _ROOT)
        return sorted(self._among(node)) if node != _ROOT else []

    def predecessors(self, index: int) -> tuple[int, list[int]]:
        """Return the longest prefix of a prompt that holds what others sampled, and these requests.

        At least one of them did not end with `handoff`.

        Returns:
            The length of the prefix, and the requests in order; none if there is no such prefix.
        """
        node = self._sampled[self._given[index]]
        if node == _ROOT:
            return 0, []
        position = self._prefixes[node][0]
        if min(self._shortest[node][1], self._handed_over[node]) >= position:
            return position, [self._sampler[node]]
        shorter = (i for i in self._among(node) if 0 < self._requests[i].prompt_len < position)
        return position, sorted(shorter)

    def alike(self, index: int) -> list[int]:
        """Return the requests with the prompt of a request, itself included, in order."""
        given = self._given[index]
        whole = 0 < self._requests[index].prompt_len == self._prefixes[given][0]
        return self._alike[given] if whole else []

    def shared(self, index: int, other: int) -> int:
        """Return the length of the longest prefix that a request shares with another's prompt."""
        depth, jump, parent = self._depth, self._jump, self._parent
        one, two = sorted((self._leaf[index], self._given[other]), key=lambda node: depth[node])
        while depth[two] > depth[one]:
            two = jump[two] if depth[jump[two]] >= depth[one] else parent[two]
        while one != two:  # a jump is as long from each node of one depth
            up = jump if jump[one] != jump[two] else parent
            one, two = up[one], up[two]
        return max(self._prefixes[one][0], 0)

    def successor(self, index: int) -> int | None:
        """Return the newest request whose prompt holds a request, if any.

        It holds all its tokens, and one that it sampled; of one that ended with `handoff`, its
        prompt.
        """
        request = self._requests[index]
        node = self._given[index]
        if request.handed_over and 0 < request.prompt_len == self._prefixes[node][0]:
            found = self._further[node]
            return found if found >= 0 else None
        node = self._prompted[self._leaf[index]]
        if 0 < request.prompt_len < request.num_tokens <= self._prefixes[node][0]:
            return self._newest[node]
        return None


def _least(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return the two least of four numbers; each pair ascends."""
    (a, b), (c, d) = one, other
    return (a, min(b, c)) if a <= c else (c, min(a, d))


def _next_shorter(
    digests: Sequence[Digests],
) -> Generator[None, None, dict[Prefix, Prefix | None]]:
    """Return the next shorter known prefix of each.

    Longest first: of several known ones, the longest is the next, and the others are shorter ones
    of that.
    """
    shorter: dict[Prefix, set[Prefix]] = {}
    done = 0
    for each in digests:
        one: Prefix | None = None
        for prefix in each.items():
            known = shorter.setdefault(prefix, set())
            if one is not None:
                known.add(one)
            one = prefix
            done += 1
            if not done % STEP:
                yield
    before: dict[Prefix, Prefix | None] = {}
    for prefix in reversed((yield from sorted_in_steps(shorter))):
        ordered = sorted(shorter[prefix], reverse=True)
        before[prefix] = ordered[0] if ordered else None
        for longer, one in pairwise(ordered):
            if one[0] < longer[0]:
                shorter[longer].add(one)
        done += 1
        if not done % STEP:
            yield
    return before


def sorted_in_steps(prefixes: Collection[Prefix]) -> Generator[None, None, list[Prefix]]:
    """Return prefixes in ascending order."""
    parts = []
    left = iter(prefixes)
    while part := sorted(islice(left, _SORTED)):
        parts.append(part)
        yield
    if len(parts) <= 1:
        return parts[0] if parts else []
    ordered: list[Prefix] = []
    for prefix in heapq.merge(*parts):
        ordered.append(prefix)
        if not len(ordered) % STEP:
            yield
    return ordered
