"""Small orders in which several passes compute the same tokens, and by hand which made the KV.

What a reader must get is written as one word a position: the way on which the row came (f: own
forward pass, s: slot, h: hand-over, p: a row that stands in) and its number in the order of all
steps, "f5..8" for several; or why there is none, "4*kv_unknown" for several. Readers are named by
trace, incarnation and policy: "t", "t#B", "t latest"; "t any" takes the first row that may stand
in, others one that is unique.
"""

from __future__ import annotations

from second_model.orders import Event, Family, Tokens

_P = (1, 2, 3, 4, 5)
_LONG = tuple(range(1, 63))
_ENGINES = Family("lineage", 4, 12, requests=3, decode_engine=True)
_DECLARED = _ENGINES._replace(name="stand-ins", requests=4, declares=True)
_FRESH = _DECLARED._replace(declares=False, fresh=True)
#: Of a request's name: its blocks on its engine, unless it hits others.
_BLOCKS = {"A": (0, 1), "B": (2, 3), "C": (4, 5), "D": (8, 9, 10)}


def _begin(
    name: str,
    engine: str = "e",
    prompt: Tokens = _P,
    *transfer: str,
    cached: int = 0,
    external: int = 0,
    blocks: tuple[int, ...] = (),
    trace: str = "t",
) -> Event:
    """A request whose KV is cached, or comes from elsewhere."""
    blocks = blocks or _BLOCKS[name]
    return (("begin", engine, name, trace, prompt, cached + external, external, blocks, *transfer),)


def _step(name: str, engine: str, start: int, count: int = 1, kind: str = "step") -> Event:
    return ((kind, engine, ((name, start, count),)),)


def _finish(name: str, tokens: Tokens, reason: str, *transfer: str) -> Event:
    return (("finish", name, tokens, reason, len(tokens) - 1, *transfer),)


def _prefill(name: str, *transfer: str, engine: str = "e", prompt: Tokens = _P) -> list[Event]:
    """Computes the prompt, samples a token and hands over."""
    return [
        _begin(name, engine, prompt),
        _step(name, engine, 0, len(prompt)),
        _finish(name, (*prompt, 11), "handoff", *transfer),
    ]


def _decode(name: str, *transfer: str, start: int = 4, kind: str = "step") -> list[Event]:
    """Loads all but the last token's KV, and samples one token from where its rows start."""
    return [
        _begin(name, "d", _P, *transfer, external=4),
        _step(name, "d", start, 5 - start, kind),
        _finish(name, (*_P, 31), "stop"),
    ]


def _again(
    name: str, tokens: Tokens, computed: int, cached: int = 0, told: tuple[int, ...] = ()
) -> list[Event]:
    """Is preempted, and resumes in other blocks; the resume may tell the number of tokens."""
    blocks = (6, 7, 10) if told else (6, 7)
    return [(("preempt", name, tokens, computed),), (("resume", name, cached, blocks, *told),)]


def _computed(
    name: str, *, engine: str = "e", prompt: Tokens = _P, kind: str = "step", trace: str = ""
) -> list[Event]:
    """Computes the whole prompt, in a trace of its own, and samples a token."""
    return [
        _begin(name, engine, prompt, trace=trace or f"t{name}"),
        _step(name, engine, 0, len(prompt), kind),
        _finish(name, (*prompt, 11), "stop"),
    ]


def _restored(name: str, *, trace: str = "t") -> list[Event]:
    """Loads the KV of all but the last token, which it computes."""
    return [
        _begin(name, external=4, trace=trace),
        _step(name, "e", 4),
        _finish(name, (*_P, 31), "stop"),
    ]


def _at(shard: int, *calls: Event) -> list[Event]:
    """Calls that one shard tells alone."""
    return [(("at", shard, *call),) for event in calls for call in event]


def _captured(name: str, *shards: int) -> list[Event]:
    """Computes a prompt, of which only some shards capture the rows."""
    begin, step, finish = _computed(name)
    skip = _step(name, "e", 0, 5, "skip")
    return [begin, *(e for s in (0, 1) for e in _at(s, step if s in shards else skip)), finish]


def _cached(name: str, *, blocks: tuple[int, ...] = (4, 2)) -> list[Event]:
    """Hits a block of four tokens."""
    return [
        _begin(name, cached=4, blocks=blocks),
        _step(name, "e", 4),
        _finish(name, (*_P, 31), "stop"),
    ]


def _live(*calls: str) -> list[Event]:
    """An engine tells something while a request is live."""
    began, *then = _computed("C")
    return [began, *(((call, "e"),) for call in calls), *then]


_LOST_ROW = [  # rows 0 to 3, none of position 2
    _begin("A"),
    _step("A", "e", 0, 2),
    _step("A", "e", 2, kind="skip"),
    _step("A", "e", 3, 2),
]

_SAMPLED_TWICE = [  # rows 0 to 5, and 6 and 7 behind the block that both share
    _begin("A"),
    _step("A", "e", 0, 5),
    _step("A", "e", 5),
    _finish("A", (*_P, 11, 12), "stop"),
    _begin("B", cached=4, blocks=(0, 2)),
    _step("B", "e", 4),
    _step("B", "e", 5),
]

_ABORTED = [  # rows 0 to 65
    _begin("A", prompt=_LONG),
    _step("A", "e", 0, 62),
    *(_step("A", "e", p) for p in range(62, 66)),
    _finish("A", (*_LONG, 201, 202, 203, 204, 205), "abort"),
]

_CUT = [  # rows 0 to 65; its caller keeps 64 tokens
    _begin("A", prompt=_LONG),
    _step("A", "e", 0, 62),
    *(_step("A", "e", p) for p in range(62, 66)),
    _finish("A", (*_LONG, 201, 202, 203, 204, 205), "stop"),
]

_LOADED = [  # row 0, behind KV of an unknown pass; B resumes in other blocks
    _begin("B", external=4),
    _step("B", "e", 4),
    *_again("B", (*_P, 31), 5),
]

_NINE = (*_P, 11, 12, 13, 14)
_FOUR_SAMPLED = [  # rows 0 to 3, behind KV of an unknown pass; B has nine tokens then
    _begin("B", external=4),
    *(_step("B", "e", p) for p in range(4, 8)),
]


def _two_tokens(name: str, reason: str, *transfer: str) -> list[Event]:
    """Samples two tokens behind the prompt, and computes the first of them."""
    return [
        _begin(name),
        _step(name, "e", 0, 5),
        _step(name, "e", 5),
        _finish(name, (*_P, 11, 12), reason, *transfer),
    ]


def _goes_on(*transfer: str, external: int = 0) -> list[Event]:
    """Begins with a token that others sampled, and samples the next one."""
    return [
        _begin("C", "d", (*_P, 11), *transfer, external=external),
        _step("C", "d", external, 6 - external),
        _finish("C", (*_P, 11, 31), "stop"),
    ]


def _two_tries(*tokens: int) -> list[Event]:
    """A try that is thrown away, and a second one elsewhere; rows 0 to 5, and 6 to 10 and more."""
    return [
        *_two_tokens("A", "abort"),
        _begin("B", "d"),
        _step("B", "d", 0, 5),
        *(_step("B", "d", p) for p in range(5, 4 + len(tokens))),
        _finish("B", (*_P, *tokens), "stop"),
    ]


def _retry_that_is_handed_over(*transfer: str) -> list[Event]:
    """A sampled two tokens, and B, whose prompt they end, the third one."""
    return [
        *_two_tokens("A", "abort"),
        _begin("B", prompt=(*_P, 11, 12)),
        _step("B", "e", 0, 7),
        _finish("B", (*_P, 11, 12, 13), "handoff", *transfer),
        _begin("C", "d", (*_P, 11, 12, 13), *transfer, external=7),
        _step("C", "d", 7),
        _finish("C", (*_P, 11, 12, 13, 31), "stop"),
    ]


def _turn_and_sibling(reason: str) -> list[Event]:
    """A turn, rows 0 to 5, a sibling elsewhere of which nothing tells, and the next turn."""
    return [
        *_two_tokens("A", reason),
        _begin("B", "d"),
        _step("B", "d", 0, 5),
        *(_step("B", "d", p) for p in (5, 6)),
        _finish("B", (*_P, 13, 14, 15), "stop"),
        _begin("C", prompt=(*_P, 11, 12, 8, 9), blocks=(4, 5, 6)),
        _step("C", "e", 0, 9),
        _finish("C", (*_P, 11, 12, 8, 9, 31), "stop"),
    ]


def _draft_in_a_block_that_is_given(*between: Event) -> list[Event]:
    """Row 3 is a draft while its block is given to B, and confirmed before C hits the block."""
    return [
        _begin("A", prompt=(1, 2), trace="tA"),
        _step("A", "e", 0, 2),
        _step("A", "e", 2, 2),
        *between,
        _begin("B", external=4, blocks=(0, 4), trace="tB"),
        _finish("A", (1, 2, 3, 4, 12), "stop"),
        _step("B", "e", 4),
        _finish("B", (*_P, 31), "stop"),
        *_cached("C", blocks=(0, 2)),
    ]


#: What it shows, the engine's shape, the order, and what each reader must get.
_ORDERS: dict[str, tuple[Family, list[Event], dict[str, str]]] = {
    "a stalled prefill, repeated elsewhere, that reports first": (
        _ENGINES,
        [
            *_prefill("A"),
            *_prefill("B", "x", engine="d"),
            _begin("C", "e", _P, "x", external=4),
            _step("C", "e", 4),
            _finish("C", (*_P, 31), "stop"),
        ],
        {"t": "h5..8 f10"},
    ),
    "a stalled prefill, repeated elsewhere, that reports last": (
        _ENGINES,
        [
            *_prefill("B", "x", engine="d"),
            _begin("C", "e", _P, "x", external=4),
            _step("C", "e", 4),
            _finish("C", (*_P, 31), "stop"),
            _begin("A"),
            _step("A", "e", 0, 5),
            _finish("A", (*_P, 11), "abort", "y"),
        ],
        {"t#C": "h0..3 f5", "t#A": "f6..10"},
    ),
    "a hand-over with an id": (
        _ENGINES,
        [*_prefill("A", "x"), *_decode("B", "x")],
        {"t": "h0..3 f5"},
    ),
    "a hand-over that the decode engine reports first": (
        _ENGINES,
        [*_decode("B", "x"), *_prefill("A", "x")],
        {"t": "h1..4 f0"},
    ),
    "a hand-over without an id": (
        _ENGINES,
        [*_prefill("A"), *_decode("B")],
        {"t": "4*kv_unknown f5"},
    ),
    "a hand-over with an id that one side alone gives": (
        _ENGINES,
        [*_prefill("A"), *_decode("B", "x")],
        {"t": "4*kv_unknown f5"},
    ),
    "a hand-over with an id that two requests ended with": (
        _ENGINES,
        [*_prefill("A", "x"), *_prefill("C", "x"), *_decode("B", "x")],
        {"t": "4*kv_unknown f10"},
    ),
    "a hand-over with an id that its taker ended with, too": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            _finish("B", (*_P, 31), "stop", "x"),
        ],
        {"t": "h0..3 f5"},
    ),
    "a hand-over that digests of another turn disprove in part": (
        _ENGINES,
        [
            *_prefill("A", "x", prompt=(1, 2)),
            _begin("B", "d", (1, 2), external=1),
            _step("B", "d", 1),
            _finish("B", (1, 2, 12), "stop"),
            _begin("C", "d", (1, 2, 12, 8), "x", external=3),
            _step("C", "d", 3),
            _finish("C", (1, 2, 12, 8, 13), "stop"),
        ],
        {"t#C": "1*kv_unknown f2 1*kv_unknown f3", "t#C latest": "h0..1 1*kv_unknown f3"},
    ),
    "a hand-over of other tokens": (
        _ENGINES,
        [*_prefill("A", "x", prompt=(1, 2, 3, 4, 6)), *_decode("B", "x")],
        {"t": "4*kv_unknown f5"},
    ),
    "a hand-over of fewer tokens": (
        _ENGINES,
        [*_prefill("A", "x", prompt=(1, 2)), *_decode("B", "x")],
        {"t": "h0..1 2*kv_unknown f2"},
    ),
    "a hand-over of rows that were not captured": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5, "skip"),
            _finish("A", (*_P, 11), "handoff", "x"),
            *_decode("B", "x"),
        ],
        {"t": "4*kv_unknown f0"},
    ),
    "a transfer that fails before the begin": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x"),
            _step("B", "d", 0, 5),
            _finish("B", (*_P, 31), "stop"),
        ],
        {"t": "f5..9"},
    ),
    "a transfer that fails after the begin": (
        _ENGINES,
        [*_prefill("A", "x"), *_decode("B", "x", start=0)],
        {"t": "f5..9"},
    ),
    "a transfer of which a part fails": (
        _ENGINES,
        [*_prefill("A", "x"), *_decode("B", "x", start=2)],
        {"t": "h0..1 f5..7"},
    ),
    "a transfer that fails, and a pass that is not captured": (
        _ENGINES,
        [*_prefill("A", "x"), *_decode("B", "x", start=0, kind="skip")],
        {"t": "5*not_captured"},
    ),
    "restored KV that was none, and a pass that is not captured": (
        _ENGINES,
        [
            _begin("A", trace="tA"),
            _step("A", "e", 0, 5),
            _begin("B", external=4),
            _step("B", "e", 0, 5, "skip"),
            _step("B", "e", 5),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "5*not_captured f5"},
    ),
    "a hand-over by a request that was preempted": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            (("preempt", "A", (*_P, 11), 5),),
            (("resume", "A", 0, (6, 7)),),
            _step("A", "e", 0, 6),
            _finish("A", (*_P, 11, 12), "handoff", "x"),
            *_decode("B", "x"),
        ],
        {"t": "h5..8 f11"},
    ),
    "an owner that was preempted after it loaded KV": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            (("preempt", "B", (*_P, 31), 5),),
            (("resume", "B", 0, (4, 5)),),
            _step("B", "d", 0, 6),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "h0..3 f5 f11", "t latest": "f6..11"},
    ),
    "a request that was computed again under other weights": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            (("preempt", "A", (*_P, 11), 5),),
            (("version", 1),),
            (("resume", "A", 0, (6, 7)),),
            _step("A", "e", 0, 6),
            _finish("A", (*_P, 11, 12), "stop"),
        ],
        {"t": "f0..4 f10", "t latest": "f5..10"},
    ),
    "a last row of a prompt that was not captured, and a preemption": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 4),
            _step("A", "e", 4, kind="skip"),
            *_again("A", (*_P, 11), 5),
            _step("A", "e", 0, 6),
            _finish("A", (*_P, 11, 12), "stop"),
        ],
        {"t": "f0..3 1*not_captured f9", "t latest": "f4..9"},
    ),
    "a last row of a prompt that was not captured, and was taken back by a preemption": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 4),
            _step("A", "e", 4, kind="skip"),
            *_again("A", _P, 4),
            _step("A", "e", 0, 5),
            _finish("A", (*_P, 11), "stop"),
        ],
        {"t": "f4..8"},
    ),
    "a row that was not captured, before a preemption": (
        _ENGINES,
        [
            *_LOST_ROW,
            *_again("A", (*_P, 11), 5),
            _step("A", "e", 0, 6),
            _finish("A", (*_P, 11, 12), "stop"),
        ],
        {"t": "f0..1 1*not_captured f2..3 f9", "t latest": "f4..9"},
    ),
    "a row that was not captured, and was taken back by a rewind": (
        _ENGINES,
        [
            *_LOST_ROW,
            (("rewind", "A", 1, 0),),
            _step("A", "e", 1, 4),
            _finish("A", (*_P, 11), "stop"),
        ],
        {"t": "f0 f4..7"},
    ),
    "a row that was not captured, and was taken back by a preemption after the answer began": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            _step("A", "e", 5, kind="skip"),
            *_again("A", (*_P, 11), 5),
            _step("A", "e", 0, 6),
            _finish("A", (*_P, 11, 12), "stop"),
        ],
        {"t": "f0..4 f10", "t latest": "f5..10"},
    ),
    "a row that was not captured, after a preemption": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            *_again("A", (*_P, 11), 5),
            _step("A", "e", 0, 2),
            _step("A", "e", 2, kind="skip"),
            _step("A", "e", 3, 3),
            _finish("A", (*_P, 11, 12), "stop"),
        ],
        {"t": "f0..4 f9", "t latest": "f5..6 1*not_captured f7..9"},
    ),
    "rows that an attempt lost that did not sample, and an abort before them": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 2),
            _step("A", "e", 2, 2, "skip"),
            *_again("A", _P, 4),
            _step("A", "e", 0, 2),
            _finish("A", _P, "abort"),
        ],
        {"t": "f2..3 2*aborted", "t latest": "f2..3 2*not_captured"},
    ),
    "a hand-over of a row that was not captured, and a pass that comes later": (
        _ENGINES,
        [
            *_LOST_ROW,
            _finish("A", (*_P, 11), "handoff", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            *_again("B", (*_P, 31), 5),
            _step("B", "d", 0, 6),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "h0..1 1*kv_unknown h2 f4 f10", "t latest": "f5..10"},
    ),
    "a hand-over, and a later pass that was not captured": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            *_again("B", (*_P, 31), 5),
            _step("B", "d", 0, 5, "skip"),
            _step("B", "d", 5),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "h0..3 f5 f6", "t latest": "5*not_captured f6"},
    ),
    "restored KV, and a later pass that was not captured": (
        _DECLARED,
        [
            *_computed("A"),
            _begin("B", external=4),
            _step("B", "e", 4),
            *_again("B", (*_P, 31), 5),
            _step("B", "e", 0, 5, "skip"),
            _step("B", "e", 5),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t any": "4*not_captured f5 f6", "t any latest": "5*not_captured f6"},
    ),
    "a hand-over along two hops": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            _step("B", "d", 5),
            _finish("B", (*_P, 31, 32), "handoff", "y"),
            _begin("C", "e", (*_P, 31, 32), "y", external=6),
            _step("C", "e", 6),
            _finish("C", (*_P, 31, 32, 33), "stop"),
        ],
        {"t": "h0..3 h5 h6 f7"},
    ),
    "turns that are handed over": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            _step("B", "d", 5),
            _finish("B", (*_P, 31, 32), "stop"),
            _begin("C", "e", (*_P, 31, 32, 8), cached=4, blocks=(0, 4)),
            _step("C", "e", 4, 4),
            _finish("C", (*_P, 31, 32, 8, 11), "handoff", "y"),
            _begin("D", "d", (*_P, 31, 32, 8), "y", cached=4, external=3, blocks=(2, 4, 5)),
            _step("D", "d", 7),
            _finish("D", (*_P, 31, 32, 8, 33), "stop"),
        ],
        {"t": "h0..3 f5..6 h9 f11", "t latest": "4*kv_unknown h7..9 f11"},
    ),
    "hand-overs in a circle": (
        _ENGINES,
        [
            _begin("A", "e", _P, "y", external=4),
            _step("A", "e", 4),
            _finish("A", (*_P, 11), "handoff", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            _finish("B", (*_P, 31), "stop", "y"),
        ],
        {"t": "4*kv_unknown f1"},
    ),
    "a turn sampled twice, and continued from the second": (
        _ENGINES,
        [
            *_SAMPLED_TWICE,
            _finish("B", (*_P, 13, 14), "stop"),
            _begin("C", prompt=(*_P, 13, 14, 8), cached=4, blocks=(0, 4)),
            _step("C", "e", 4, 4),
            _finish("C", (*_P, 13, 14, 8, 15), "stop"),
        ],
        {"t": "s0..3 f6..7 f10..11", "t latest": "s0..3 f8..11", "t#A": "f0..5"},
    ),
    "a turn sampled twice, and continued from the first": (
        _ENGINES,
        [
            *_SAMPLED_TWICE,
            _finish("B", (*_P, 13, 14), "stop"),
            _begin("C", prompt=(*_P, 11, 12, 8), cached=6, blocks=(0, 1)),
            _step("C", "e", 6, 2),
            _finish("C", (*_P, 11, 12, 8, 15), "stop"),
        ],
        {"t": "f0..5 f8..9", "t latest": "s0..5 f8..9", "t#B": "s0..3 f6..7"},
    ),
    "equal siblings": (
        _ENGINES,
        [
            *_SAMPLED_TWICE,
            _finish("B", (*_P, 11, 12), "stop"),
            _begin("C", prompt=(*_P, 11, 12, 8)),
            _step("C", "e", 0, 8),
            _finish("C", (*_P, 11, 12, 8, 15), "stop"),
            _begin("D", prompt=(*_P, 11, 12, 8, 15, 9)),
            _step("D", "e", 0, 10),
            _finish("D", (*_P, 11, 12, 8, 15, 9, 16), "stop"),
        ],
        {
            "t#C": "6*ambiguous f14..15",
            "t#C latest": "f8..15",
            "t": "6*ambiguous f14..15 f24..25",
            "t latest": "f16..25",
        },
    ),
    "equal siblings, and a slot of their prompt alone": (
        _ENGINES,
        [
            *_SAMPLED_TWICE,
            _finish("B", (*_P, 11, 12), "stop"),
            _begin("C", prompt=(*_P, 11, 12, 8), cached=4, blocks=(0, 4)),
            _step("C", "e", 4, 4),
            _finish("C", (*_P, 11, 12, 8, 15), "stop"),
        ],
        {"t": "6*ambiguous f10..11"},
    ),
    "equal siblings, and a slot that says which": (
        _ENGINES,
        [
            *_SAMPLED_TWICE,
            _finish("B", (*_P, 11, 12), "stop"),
            _begin("C", prompt=(*_P, 11, 12, 8), cached=6, blocks=(0, 2)),
            _step("C", "e", 6, 2),
            _finish("C", (*_P, 11, 12, 8, 15), "stop"),
        ],
        {"t": "s0..3 f6..7 f8..9"},
    ),
    "an abort with more tokens than the caller got": (
        _ENGINES._replace(block_size=64, num_blocks=8),
        [
            *_ABORTED,
            _begin("B", "d", (*_LONG, 201, 202, 203, 204)),
            _step("B", "d", 0, 66),
            _finish("B", (*_LONG, 201, 202, 203, 204, 301), "stop"),
        ],
        {"t#B": "f0..64 f131", "t#B latest": "f66..131", "t#A": "f0..65"},
    ),
    "an abort with more tokens than the caller got, and its next turn": (
        _ENGINES._replace(block_size=64, num_blocks=8),
        [
            *_ABORTED,
            _begin("B", "e", (*_LONG, 201, 202, 203, 8)),
            _step("B", "e", 0, 66),
            _finish("B", (*_LONG, 201, 202, 203, 8, 301), "stop"),
        ],
        {"t#B": "f0..63 f130..131", "t#B latest": "f66..131", "t#A": "f0..65"},
    ),
    "an abort with more tokens than the caller got, and its next turn elsewhere": (
        _ENGINES._replace(block_size=64, num_blocks=8),
        [
            *_ABORTED,
            _begin("B", "d", (*_LONG, 201, 202, 203, 8)),
            _step("B", "d", 0, 66),
            _finish("B", (*_LONG, 201, 202, 203, 8, 301), "stop"),
        ],
        {"t#B": "f0..62 f129..131", "t#B latest": "f66..131", "t#A": "f0..65"},
    ),
    "a retry under other weights": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            _finish("A", (*_P, 11), "stop"),
            (("version", 1),),
            _begin("B", external=4),
            _step("B", "e", 4),
            _finish("B", (*_P, 13), "stop"),
        ],
        {"t#A": "f0..4", "t#B": "4*kv_unknown f5"},
    ),
    "turns of which the second has KV from elsewhere": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            _finish("A", (*_P, 6), "stop"),
            _begin("B", prompt=(*_P, 6, 7), external=5),
            _step("B", "e", 5, 2),
            _finish("B", (*_P, 6, 7, 8), "stop"),
        ],
        {"t": "f0..4 f5..6", "t latest": "5*kv_unknown f5..6"},
    ),
    "turns of which the second has KV from elsewhere that another trace computed": (
        _DECLARED,
        [
            _begin("C", prompt=(*_P, 6, 7), trace="tC"),
            _step("C", "e", 0, 7),
            _begin("A"),
            _step("A", "e", 0, 5),
            _finish("A", (*_P, 6), "stop"),
            _begin("B", prompt=(*_P, 6, 7), external=6),
            _step("B", "e", 6),
            _finish("B", (*_P, 6, 7, 8), "stop"),
        ],
        {"t": "f7..11 p5 f12", "t latest": "5*kv_unknown p5 f12"},
    ),
    "KV of a prompt that another trace computed under the same weights": (
        _DECLARED,
        [
            _begin("A", trace="tA"),
            _step("A", "e", 0, 5),
            _begin("B", external=4),
            _step("B", "e", 4),
            _finish("B", (*_P, 13), "stop"),
        ],
        {"t": "p0..3 f5", "t any": "p0..3 f5"},
    ),
    "KV from a store of which nobody says that it was emptied": (
        _ENGINES,
        [*_computed("A"), *_restored("B")],
        {"t any": "4*kv_unknown f5"},
    ),
    "KV from a store that was emptied": (
        _FRESH,
        [*_computed("A"), *_restored("B")],
        {"t": "p0..3 f5", "t any": "p0..3 f5"},
    ),
    "KV from a store that was emptied while a request was live": (
        _ENGINES,
        [*_live("reset", "emptied"), *_computed("A"), *_restored("B")],
        {"t any": "4*kv_unknown f10"},
    ),
    "KV from a store that was emptied while nothing was live, and once more": (
        _FRESH,
        [*_live("emptied"), *_computed("A"), *_restored("B")],
        {"t any": "4*kv_unknown f10"},
    ),
    "KV from a store that was emptied while a request was preempted": (
        _ENGINES,
        [
            _begin("C", trace="tC"),
            _step("C", "e", 0, 5),
            (("preempt", "C", (*_P, 11), 5),),
            (("reset", "e"),),
            (("emptied", "e"),),
            (("resume", "C", 0, (6, 7)),),
            _step("C", "e", 0, 6),
            _finish("C", (*_P, 11, 12), "stop"),
            *_computed("A", engine="d"),
            *_restored("B"),
        ],
        {"t any": "4*kv_unknown f16"},
    ),
    "KV from a store that was emptied, and a cache that was emptied once more": (
        _FRESH,
        [*_live("reset"), *_computed("A"), *_restored("B")],
        {"t": "4*kv_unknown f10", "t any": "p5..8 f10"},
    ),
    "KV from a store that was emptied after a cache in use": (
        _ENGINES,
        [
            (("reset", "e"),),
            *_live("reset"),
            (("emptied", "e"),),
            *_computed("A"),
            *_restored("B"),
        ],
        {"t any": "4*kv_unknown f10"},
    ),
    "KV from a store that was emptied while the cache of its engine was not": (
        _ENGINES,
        [(("emptied", "e"),), (("reset", "e"),), *_computed("A"), *_restored("B")],
        {"t any": "4*kv_unknown f5"},
    ),
    "KV from a store that is older than a pass of other weights": (
        _FRESH,
        [
            *_computed("C"),
            (("version", 1),),
            *_computed("A", engine="e"),
            *_restored("B"),
        ],
        {"t any": "4*kv_unknown f10"},
    ),
    "KV from a store to which blocks of other weights may have been written": (
        _ENGINES,
        [
            (("reset", "e"),),
            *_computed("C", engine="e"),
            (("emptied", "e"),),
            (("version", 1),),
            *_computed("A", engine="d"),
            *_restored("B"),
        ],
        {"t any": "4*kv_unknown f10"},
    ),
    "KV from a store that was emptied with the update": (
        _FRESH,
        [
            *_computed("C", engine="e"),
            (("version", 1),),
            (("reset", "e"),),
            (("emptied", "e"),),
            *_computed("A", engine="d"),
            *_restored("B"),
        ],
        {"t": "p5..8 f10", "t any": "p5..8 f10"},
    ),
    "KV from a store, and a pass that was not captured": (
        _FRESH,
        [*_computed("A", engine="d"), *_computed("C", engine="e", kind="skip"), *_restored("B")],
        {"t any": "4*kv_unknown f5"},
    ),
    "KV of one version, and rows of another one": (
        _DECLARED,
        [*_computed("A"), (("version", 1),), *_restored("B")],
        {"t any": "4*kv_unknown f5"},
    ),
    "KV of one version, and an update before the first rows": (
        _DECLARED,
        [
            *_computed("A"),
            _begin("B", external=4),
            (("version", 1),),
            _step("B", "e", 4),
            _finish("B", (*_P, 31), "stop"),
        ],
        {"t": "p0..3 f5"},
    ),
    "KV of another model": (
        _DECLARED._replace(strangers="d"),
        [*_computed("A", engine="d"), *_restored("B")],
        {"t any": "4*kv_unknown f5"},
    ),
    "a prompt that was computed twice": (
        _DECLARED,
        [*_computed("A"), *_computed("C"), *_restored("B")],
        {"t": "4*kv_unknown f10", "t any": "p5..8 f10"},
    ),
    "a prompt that was computed twice, later": (
        _DECLARED,
        [*_restored("B"), *_computed("A"), *_computed("C")],
        {"t": "4*kv_unknown f0", "t any": "p1..4 f0"},
    ),
    "a prompt that was computed before, and later": (
        _DECLARED,
        [*_computed("A"), *_restored("B"), *_computed("C")],
        {"t": "4*kv_unknown f5", "t any": "p0..3 f5"},
    ),
    "a prompt that was computed in the same trace, and in another one": (
        _DECLARED,
        [*_restored("B"), *_computed("A"), *_computed("C", trace="t")],
        {"t#B": "4*kv_unknown f0", "t#B any": "p6..9 f0"},
    ),
    "a prompt that was computed in the same trace alone": (
        _DECLARED,
        [*_restored("B"), *_computed("C", trace="t")],
        {"t#B": "p1..4 f0"},
    ),
    "a prompt that two requests of another trace computed": (
        _DECLARED,
        [*_computed("A", trace="tA"), *_computed("C", trace="tA"), *_restored("B")],
        {"t": "4*kv_unknown f10", "t any": "p0..3 f10"},
    ),
    "a prompt that two attempts computed": (
        _DECLARED,
        [
            _begin("A", trace="tA"),
            _step("A", "e", 0, 5),
            (("preempt", "A", (*_P, 11), 5),),
            (("resume", "A", 0, (6, 7)),),
            _step("A", "e", 0, 6),
            _finish("A", (*_P, 11, 12), "stop"),
            *_restored("B"),
        ],
        {"t": "4*kv_unknown f11", "t any": "p0..3 f11"},
    ),
    "a prompt of which another request computed a part once more": (
        _DECLARED,
        [
            *_computed("A"),
            _begin("C", trace="tC", external=2),
            _step("C", "e", 2, 3),
            _finish("C", (*_P, 31), "stop"),
            *_restored("B"),
        ],
        {"t": "p0..1 2*kv_unknown f8", "t any": "p0..1 p5..6 f8"},
    ),
    "a hand-over that was computed again, and taken back": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 0, 5),
            (("preempt", "B", (*_P, 31), 0),),
            _finish("B", (*_P, 31), "abort"),
        ],
        {"t": "4*kv_unknown 1*aborted"},
    ),
    "a preemption that an engine repeats": (
        _ENGINES,
        [
            _begin("A", trace="tA"),
            _step("A", "e", 0, 5),
            (("preempt", "A", (*_P, 11), 5),),
            (("preempt", "A", (*_P, 11), 5),),
            _begin("B", prompt=(*_P, 11), cached=5, blocks=(0, 1), trace="tB"),
            _step("B", "e", 5),
            _step("A", "e", 5),
            _begin("C", prompt=(*_P, 11, 12), cached=6, blocks=(0, 1)),
            _step("C", "e", 6),
            _finish("C", (*_P, 11, 12, 31), "stop"),
        ],
        {"t": "s0..4 1*kv_unknown f7"},
    ),
    "a resume without a preemption": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            _step("A", "e", 5, 3),
            (("resume", "A", 6, (0, 1)),),
            _step("A", "e", 6),
            _step("A", "e", 7),
            _finish("A", (*_P, 11, 12, 13, 14), "stop"),
        ],
        {"t": "f0..5 f8..9"},
    ),
    "an attempt that loaded KV and did not sample": (
        _DECLARED,
        [
            *_computed("A"),
            _begin("B", external=4),
            (("preempt", "B", _P, 4),),
            (("resume", "B", 4, (2, 6)),),
            _step("B", "e", 4),
            _finish("B", (*_P, 31), "stop"),
        ],
        {"t any": "4*kv_unknown f5"},
    ),
    "an attempt that loaded KV and sampled": (
        _DECLARED,
        [
            *_computed("A"),
            _begin("B", external=4),
            _step("B", "e", 4),
            (("preempt", "B", (*_P, 31), 5),),
            (("resume", "B", 4, (2, 6)),),
            _step("B", "e", 4, 2),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "p0..3 f5 f7"},
    ),
    "KV of which each shard has a row of another pass": (
        _DECLARED._replace(sharded=True),
        [*_captured("A", 0), *_captured("C", 1), *_restored("B")],
        {"t": "4*kv_unknown f10"},
    ),
    "KV of which one shard has rows of two passes": (
        _DECLARED._replace(sharded=True),
        [*_computed("A"), *_captured("C", 1), *_restored("B")],
        {"t": "4*kv_unknown f10"},
    ),
    "KV from a store that one of two shards emptied": (
        _ENGINES._replace(sharded=True),
        [
            *_at(0, (("reset", "e"),), (("emptied", "e"),)),
            *_computed("A", engine="d"),
            *_restored("B"),
        ],
        {"t any": "4*kv_unknown f5"},
    ),
    "KV from a store, and a pass that one of two shards did not capture": (
        _FRESH._replace(sharded=True),
        [*_captured("C", 0), *_computed("A", engine="d"), *_restored("B")],
        {"t any": "4*kv_unknown f10"},
    ),
    "a cached block of which a row was invalid": (
        _FRESH,
        [
            *_computed("C", prompt=_P[:4], kind="bad"),
            *_computed("A", engine="d"),
            *_cached("B"),
        ],
        {"t": "s0..2 p7 f9", "t any": "s0..2 p7 f9"},
    ),
    "a cached block of which a row was invalid, and an update": (
        _FRESH,
        [
            *_computed("C", prompt=_P[:4], kind="bad"),
            (("version", 1),),
            *_computed("A", engine="d"),
            *_cached("B"),
        ],
        {"t any": "s0..2 1*kv_unknown f9"},
    ),
    "a cached block of which a row was invalid, of an engine that never emptied its cache": (
        _DECLARED,
        [
            *_computed("C", prompt=_P[:4], kind="bad"),
            *_computed("A", engine="d"),
            *_cached("B"),
        ],
        {"t any": "s0..2 1*kv_unknown f9"},
    ),
    "a cached block of which a row was invalid, and a host tier": (
        _ENGINES._replace(host_blocks=1),
        [
            (("reset", "e"),),
            *_computed("C", prompt=_P[:4], kind="bad"),
            *_computed("A", engine="d"),
            *_cached("B"),
        ],
        {"t any": "s0..2 1*kv_unknown f9"},
    ),
    "a cached block of which a row was invalid, and a host tier that was emptied": (
        _FRESH._replace(host_blocks=1),
        [
            *_computed("C", prompt=_P[:4], kind="bad"),
            *_computed("A", engine="d"),
            *_cached("B"),
        ],
        {"t": "s0..2 p7 f9"},
    ),
    "a cached block that another request loaded": (
        _ENGINES._replace(requests=4),
        [
            (("reset", "e"),),
            *_computed("A", engine="d"),
            *_restored("C", trace="tC"),
            *_cached("B", blocks=(4, 2)),
        ],
        {"t any": "4*kv_unknown f6", "tC any": "4*kv_unknown f5"},
    ),
    "a cached block that another request loaded from a store that was emptied": (
        _FRESH,
        [
            *_computed("A", engine="d"),
            *_restored("C", trace="tC"),
            *_cached("B", blocks=(4, 2)),
        ],
        {"t": "p0..3 f6", "tC": "p0..3 f5"},
    ),
    "an attempt that sampled nothing, and one that sampled": (
        _ENGINES,
        [
            *_LOADED,
            _step("B", "e", 0, 3),
            *_again("B", (*_P, 31), 3),
            _step("B", "e", 0, 6),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "f4..7 f0 f9", "t latest": "f4..9"},
    ),
    "an attempt that sampled nothing, and lost a row": (
        _ENGINES,
        [
            *_LOADED,
            _step("B", "e", 0, 2),
            _step("B", "e", 2, kind="skip"),
            *_again("B", (*_P, 31), 3),
            _step("B", "e", 0, 6),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "f3..6 f0 f8", "t latest": "f3..8"},
    ),
    "an attempt that was aborted before it sampled": (
        _ENGINES,
        [*_LOADED, _step("B", "e", 0, 3), _finish("B", (*_P, 31), "abort")],
        {"t": "4*kv_unknown f0", "t latest": "f1..3 1*kv_unknown f0"},
    ),
    "an attempt that computed again what was sampled from, and was aborted": (
        _ENGINES,
        [*_LOADED, _step("B", "e", 0, 5), _finish("B", (*_P, 31), "abort")],
        {"t": "4*kv_unknown f0", "t latest": "f1..5"},
    ),
    "an attempt that sampled again, and of which the row was lost": (
        _ENGINES,
        [
            *_LOADED,
            _step("B", "e", 0, 5),
            _step("B", "e", 5, kind="skip"),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "f1..4 f0 1*not_captured", "t latest": "f1..5 1*not_captured"},
    ),
    "an attempt that computed all known tokens again, and sampled nothing": (
        _ENGINES,
        [
            *_FOUR_SAMPLED,
            *_again("B", _NINE, 8, told=(9,)),
            _step("B", "e", 0, 9),
            _finish("B", _NINE, "abort"),
        ],
        {"t": "4*kv_unknown f0..3", "t latest": "f4..11"},
    ),
    "an attempt that computed all known tokens again, and sampled one": (
        _ENGINES,
        [
            *_FOUR_SAMPLED,
            *_again("B", _NINE, 8, told=(9,)),
            _step("B", "e", 0, 9),
            _finish("B", (*_NINE, 31), "abort"),
        ],
        {"t": "f4..7 f0..3 f12", "t latest": "f4..12"},
    ),
    "an attempt that sampled nothing, behind one that was preempted with less than it computed": (
        _ENGINES,
        [
            *_FOUR_SAMPLED,
            *_again("B", _NINE, 7, told=(9,)),
            _step("B", "e", 0, 9),
            _finish("B", _NINE, "abort"),
        ],
        {"t": "4*kv_unknown f0..2 1*aborted", "t latest": "f4..11"},
    ),
    "an attempt that sampled, behind one that was preempted with less than it computed": (
        _ENGINES,
        [
            *_FOUR_SAMPLED,
            *_again("B", _NINE, 7, told=(9,)),
            _step("B", "e", 0, 9),
            _finish("B", (*_NINE, 31), "abort"),
        ],
        {"t": "f4..7 f0..2 f11..12", "t latest": "f4..12"},
    ),
    "an attempt with further tokens, of which it computed a part": (
        _ENGINES,
        [
            _begin("B", external=4),
            _step("B", "e", 4),
            _step("B", "e", 5),
            *_again("B", (*_P, 11, 12), 6, told=(10,)),
            _step("B", "e", 0, 8),
            _finish("B", (*_P, 11, 12, 7, 8, 9), "abort"),
        ],
        {"t": "4*kv_unknown f0..1 3*aborted", "t latest": "f2..9 1*aborted"},
    ),
    "an attempt of which two shards were told different numbers of tokens": (
        _ENGINES._replace(sharded=True),
        [
            *_FOUR_SAMPLED,
            (("preempt", "B", _NINE, 8),),
            *_at(0, (("resume", "B", 0, (6, 7, 10), 9),)),
            *_at(1, (("resume", "B", 0, (6, 7, 10), 11),)),
            _step("B", "e", 0, 9),
            _finish("B", (*_NINE, 31), "abort"),
        ],
        {"t": "4*kv_unknown f0..3 1*aborted", "t latest": "f4..12"},
    ),
    "a hand-over, and a sibling that sampled its token": (
        _ENGINES,
        [*_computed("A", trace="t"), *_prefill("B", "x"), *_goes_on("x", external=5)],
        {"t": "h5..9 f10", "t latest": "h5..9 f10"},
    ),
    "a hand-over without an id, and a sibling that sampled its token": (
        _ENGINES,
        [*_computed("A", trace="t"), *_prefill("B"), *_goes_on(external=5)],
        {"t": "5*ambiguous f10", "t latest": "5*kv_unknown f10"},
    ),
    "a prompt with a token that a sibling sampled, and a hand-over without an id": (
        _ENGINES,
        [*_prefill("B", "x"), *_computed("A", trace="t"), *_goes_on()],
        {"t": "5*ambiguous f15", "t latest": "f10..15"},
    ),
    "a hand-over without an id, a sibling that sampled its tokens, and a slot of the hand-over": (
        _ENGINES,
        [
            *_two_tokens("A", "stop"),
            *_two_tokens("B", "handoff"),
            _begin("C", prompt=(*_P, 11, 12), cached=6, blocks=(2, 3)),
            _step("C", "e", 6),
            _finish("C", (*_P, 11, 12, 31), "stop"),
        ],
        {"t": "s6..11 f12"},
    ),
    "a hand-over without an id, a sibling that sampled its tokens, and a slot of the sibling": (
        _ENGINES,
        [
            *_two_tokens("A", "stop"),
            *_two_tokens("B", "handoff"),
            _begin("C", prompt=(*_P, 11, 12), cached=6, blocks=(0, 1)),
            _step("C", "e", 6),
            _finish("C", (*_P, 11, 12, 31), "stop"),
        ],
        {"t": "f0..5 f12", "t latest": "s0..5 f12"},
    ),
    "a hand-over without an id of fewer tokens than a sibling sampled": (
        _ENGINES,
        [
            *_prefill("A"),
            *_two_tokens("B", "stop"),
            _begin("C", prompt=(*_P, 11, 12, 8)),
            _step("C", "e", 0, 8),
            _finish("C", (*_P, 11, 12, 8, 31), "stop"),
        ],
        {"t": "f5..10 f17..18", "t latest": "f11..18"},
    ),
    "an abort, and a retry with its tokens that is handed over with the next one": (
        _ENGINES,
        _retry_that_is_handed_over("x"),
        {"t": "f0..5 h12 f13", "t latest": "h6..12 f13"},
    ),
    "an abort, and a retry with its tokens that is handed over without an id": (
        _ENGINES,
        _retry_that_is_handed_over(),
        {"t": "f0..5 1*kv_unknown f13", "t latest": "7*kv_unknown f13"},
    ),
    "a turn that was handed over with its token, and the next one": (
        _ENGINES,
        [
            *_prefill("A", "x"),
            _begin("B", "d", _P, "x", external=4),
            _step("B", "d", 4),
            _finish("B", (*_P, 11), "stop"),
            _begin("C", "d", (*_P, 11, 8)),
            _step("C", "d", 0, 7),
            _finish("C", (*_P, 11, 8, 31), "stop"),
        ],
        {"t": "h0..3 f5 f11..12", "t latest": "f6..12"},
    ),
    "a try that was thrown away, and the next turn of a second one, of which the end is known": (
        _ENGINES,
        [
            *_two_tries(11, 13),
            _begin("C", prompt=(*_P, 11, 13, 8)),
            _step("C", "e", 0, 8),
            _finish("C", (*_P, 11, 13, 8, 31), "stop"),
        ],
        {"t": "f6..11 f18..19", "t latest": "f12..19", "t#A": "f0..5"},
    ),
    "a try that was thrown away, and the next turn of a second one, of which it is not": (
        _ENGINES,
        [
            *_two_tries(11, 13, 14),
            _begin("C", prompt=(*_P, 11, 13, 14, 8), blocks=(4, 5, 6)),
            _step("C", "e", 0, 9),
            _finish("C", (*_P, 11, 13, 14, 8, 31), "stop"),
        ],
        {
            "t#C": "5*ambiguous f18..21",
            "t#C latest": "f13..21",
            "t#A": "f0..5",
            "t#B": "f6..12",
        },
    ),
    "a turn that stands in a prompt with the token that ended it, and a sibling elsewhere": (
        _ENGINES,
        _turn_and_sibling("stop"),
        {"t#C": "f0..5 f19..21", "t#B": "f6..12"},
    ),
    "a turn that was aborted, and a sibling elsewhere": (
        _ENGINES,
        _turn_and_sibling("abort"),
        {"t#C": "6*ambiguous f19..21", "t#A": "f0..5"},
    ),
    "an answer that its caller cut, and its next turn": (
        _ENGINES._replace(block_size=64, num_blocks=8),
        [
            *_CUT,
            _begin("B", prompt=(*_LONG, 201, 202, 8)),
            _step("B", "e", 0, 65),
            _finish("B", (*_LONG, 201, 202, 8, 301), "stop"),
        ],
        {"t#B": "f0..62 f129..130", "t#B latest": "f66..130", "t#A": "f0..65"},
    ),
    "an answer that its caller cut, and a slot of the last token": (
        _ENGINES._replace(block_size=64, num_blocks=8),
        [
            *_CUT,
            _begin("B", prompt=(*_LONG, 201, 202, 8), cached=64, blocks=(0, 2)),
            _step("B", "e", 64),
            _finish("B", (*_LONG, 201, 202, 8, 301), "stop"),
        ],
        {"t#B": "f0..62 s63 f66", "t#B latest": "s0..63 f66", "t#A": "f0..65"},
    ),
    "an answer that its caller cut, and a sibling of which the prompt tells": (
        _ENGINES._replace(block_size=64, num_blocks=8),
        [
            *_CUT,
            _begin("C", prompt=_LONG),
            _step("C", "e", 0, 62),
            _finish("C", (*_LONG, 301), "stop"),
            _begin("B", prompt=(*_LONG, 201, 202, 8), blocks=(6, 7)),
            _step("B", "e", 0, 65),
            _finish("B", (*_LONG, 201, 202, 8, 301), "stop"),
        ],
        {"t#B": "f0..62 f191..192", "t#C": "f66..127"},
    ),
    "an answer that its caller cut, and a sibling elsewhere of which nothing tells": (
        _ENGINES._replace(block_size=64, num_blocks=8),
        [
            *_CUT,
            _begin("C", "d", prompt=_LONG),
            _step("C", "d", 0, 62),
            _finish("C", (*_LONG, 301), "stop"),
            _begin("B", prompt=(*_LONG, 201, 202, 8), blocks=(6, 7)),
            _step("B", "e", 0, 65),
            _finish("B", (*_LONG, 201, 202, 8, 301), "stop"),
        ],
        {"t#B": "63*ambiguous f191..192", "t#A": "f0..65", "t#C": "f66..127"},
    ),
    "a pass that a preemption counts, and of which the row comes late": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 5),
            (("preempt", "A", (*_P, 11, 12), 6),),
            _step("A", "e", 5),
            (("resume", "A", 0, (6, 7)),),
            _step("A", "e", 0, 7),
            _finish("A", (*_P, 11, 12, 13), "stop"),
        ],
        {"t": "f0..4 1*not_captured f12", "t latest": "f6..12"},
    ),
    "a pass behind KV from elsewhere that a preemption counts, and of which no row comes": (
        _ENGINES,
        [
            _begin("B", external=4),
            *_again("B", (*_P, 31), 5),
            _step("B", "e", 0, 6),
            _finish("B", (*_P, 31, 32), "stop"),
        ],
        {"t": "f0..3 1*not_captured f5", "t latest": "f0..5"},
    ),
    "passes of a part of the prompt that a preemption counts, and of which the rows come late": (
        _ENGINES,
        [
            _begin("A"),
            _step("A", "e", 0, 2),
            (("preempt", "A", _P, 4),),
            _step("A", "e", 2, 2),
            (("resume", "A", 0, (6, 7)),),
            _step("A", "e", 0, 5),
            _finish("A", (*_P, 11), "stop"),
        ],
        {"t": "f4..8", "t latest": "f4..8"},
    ),
    "a draft that is confirmed after its block was given": (
        _ENGINES,
        _draft_in_a_block_that_is_given(),
        {"t": "4*kv_unknown f5", "tA": "f0..3", "tB": "4*kv_unknown f4"},
    ),
    "a draft that was sent, and is confirmed after its block was given": (
        _ENGINES,
        _draft_in_a_block_that_is_given((("flush",),)),
        {"t": "4*kv_unknown f5", "tA": "f0..3", "tB": "4*kv_unknown f4"},
    ),
    "KV of a prompt that another trace computed under weights of which no one gave the version": (
        _DECLARED._replace(version=None),
        [
            _begin("A", trace="tA"),
            _step("A", "e", 0, 5),
            _begin("B", external=4),
            _step("B", "e", 4),
            _finish("B", (*_P, 13), "stop"),
        ],
        {"t": "4*kv_unknown f5"},
    ),
}

ORDERS = {name: (family, tuple(order)) for name, (family, order, _) in _ORDERS.items()}


def _words(text: str) -> tuple[str, ...]:
    """One word for each position."""
    found: list[str] = []
    for word in text.split():
        if "*" in word:
            times, reason = word.split("*")
            found += [reason] * int(times)
        else:
            first, _, last = word[1:].partition("..")
            found += [f"{word[0]}{n}" for n in range(int(first), int(last or first) + 1)]
    return tuple(found)


#: What each reader must get at the end of an order.
LAW = {
    (family, tuple(order)): {reader: _words(text) for reader, text in law.items()}
    for family, order, law in _ORDERS.values()
}
