"""The smallest orders in which rows were once served wrong, or lost."""

from __future__ import annotations

from second_model.orders import Event, Family

_LONG = tuple(range(1, 65))
_BLOCKS_OF_4 = Family("scenario", 4, 8, requests=3)
#: Rows can stand in: the KV version of what it loads is known.
_DECLARED = _BLOCKS_OF_4._replace(declares=True)

#: What it shows, the engine's shape, and the order.
SCENARIOS: dict[str, tuple[Family, tuple[Event, ...]]] = {
    "a rejected draft behind the last token": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0,)),),
            (("step", "e", (("A", 0, 2),)),),
            (("add", "A", (1,)), ("step", "e", (("A", 2, 2),))),
            (("finish", "A", (1, 2, 1004, 1006), "stop", 3),),
            (("step", "e", (("A", 3, 1),)),),
            (("begin", "e", "B", "tB", (1, 2, 1004, 1006, 8), 4, 0, (0, 1)),),
            (("step", "e", (("B", 4, 1),)),),
        ),
    ),
    "an end that comes after the row of its last token": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0,)),),
            (("step", "e", (("A", 0, 2),)),),
            (("add", "A", (1,)), ("step", "e", (("A", 2, 1),))),
            (("finish", "A", (1, 2, 1004), "stop", 2),),
            (("begin", "e", "B", "tB", (1, 2, 1004, 8), 3, 0, (0, 2)),),
            (("step", "e", (("B", 3, 1),)),),
        ),
    ),
    "blocks of drafts that may still be rejected": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 2),)),),
            (("step", "e", (("A", 2, 3),)),),
        ),
    ),
    "the last prompt token after a hand-over": (
        _BLOCKS_OF_4._replace(decode_engine=True),
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0,)),),
            (("step", "e", (("A", 0, 2),)),),
            (("finish", "A", (1, 2, 1004), "handoff", 2),),
            (("begin", "d", "B", "t", (1, 2), 1, 1, (0,)),),
            (("version", 1),),
            (("step", "d", (("B", 1, 1),)),),
            (("finish", "B", (1, 2, 2004), "stop", 2),),
        ),
    ),
    "blocks between a begin and its first rows": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4, 5), 4, 0, (0, 2)),),
            (("add", "B", (3,)),),
            (("step", "e", (("A", 0, 5), ("B", 4, 1))),),
        ),
    ),
    "samples of one trace that begin in one step": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "tA", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("begin", "e", "B", "t", (1, 2, 3, 4, 6), 4, 0, (0, 2)),),
            (("begin", "e", "C", "t", (1, 2, 3, 4, 7), 4, 0, (0, 3)),),
            (("step", "e", (("A", 0, 5), ("B", 4, 1), ("C", 4, 1))),),
        ),
    ),
    "cached tokens that end inside a block of the same step": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4), 0, 0, (0, 1)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4), 3, 0, (0, 2)),),
            (("step", "e", (("A", 0, 4), ("B", 3, 1))),),
        ),
    ),
    "a deleted trace of which a shard reports later": (
        _BLOCKS_OF_4._replace(sharded=True),
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0,)),),
            (("step", "e", (("A", 0, 2),)),),
            (("flush",), ("delete", "t")),
            (("sync",),),
        ),
    ),
    "KV of a prompt that another trace computed": (
        _DECLARED,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 5),)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4, 5), 4, 4, (2, 3)),),
            (("step", "e", (("B", 4, 1),)),),
        ),
    ),
    "a flush between a begin and its first rows": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4, 5), 4, 0, (0, 2)),),
            (("flush",),),
            (("step", "e", (("A", 0, 5),)),),
            (("step", "e", (("B", 4, 1),)),),
        ),
    ),
    "a pass that is not captured, into a block that another request went on in": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4), 3, 0, (0, 2)),),
            (("step", "e", (("A", 0, 1),)),),
            (("begin", "e", "C", "tC", (1, 2, 3, 4, 5), 1, 0, (0, 3)),),
            (("step", "e", (("C", 1, 1),)),),
            (("skip", "e", (("A", 1, 4),)),),
            (("step", "e", (("B", 3, 1),)),),
        ),
    ),
    "a pass into a block that another request went on in": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4), 3, 0, (0, 2)),),
            (("step", "e", (("A", 0, 1),)),),
            (("begin", "e", "C", "tC", (1, 2, 3, 4, 5), 1, 0, (0, 3)),),
            (("step", "e", (("C", 1, 1),)),),
            (("step", "e", (("A", 1, 4),)),),
            (("step", "e", (("B", 3, 1),)),),
        ),
    ),
    "KV of which one shard knows the pass, and another does not": (
        _DECLARED._replace(sharded=True),
        (
            (("reset", "e"),),
            (("begin", "e", "C", "tC", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("at", 0, "bad", "e", (("C", 0, 4),)),),
            (("at", 0, "step", "e", (("C", 4, 1),)),),
            (("at", 1, "step", "e", (("C", 0, 5),)),),
            (("finish", "C", (1, 2, 3, 4, 5, 11), "stop", 5),),
            (("begin", "e", "A", "tA", (1, 2, 3, 4, 5), 0, 0, (2, 3)),),
            (("step", "e", (("A", 0, 5),)),),
            (("finish", "A", (1, 2, 3, 4, 5, 11), "stop", 5),),
            (("begin", "e", "B", "t", (1, 2, 3, 4, 5), 4, 0, (0, 4)),),
            (("step", "e", (("B", 4, 1),)),),
            (("finish", "B", (1, 2, 3, 4, 5, 31), "stop", 5),),
        ),
    ),
    "KV from elsewhere that one shard computed again": (
        _DECLARED._replace(sharded=True),
        (
            (("begin", "e", "A", "tA", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 5),)),),
            (("finish", "A", (1, 2, 3, 4, 5, 11), "stop", 5),),
            (("begin", "e", "B", "t", (1, 2, 3, 4, 5), 4, 4, (2, 3)),),
            (("at", 0, "step", "e", (("B", 2, 3),)),),
        ),
    ),
    "a skipped step behind a draft": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 2),)),),
            (("step", "e", (("A", 2, 2),)),),
            (("skip", "e", (("A", 4, 1),)),),
        ),
    ),
    "rows behind the cached tokens of a block that another request fills": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4), 0, 0, (0, 1)),),
            (("begin", "e", "B", "tB", (1, 2), 1, 0, (0,)),),
            (("step", "e", (("A", 0, 4),)),),
            (("step", "e", (("B", 1, 1),)),),
        ),
    ),
    "an end after a resume that computed nothing": (
        _BLOCKS_OF_4._replace(block_size=1, num_blocks=24),
        (
            (("begin", "e", "B", "t", (1, 2), 0, 0, (4, 5, 6, 7)),),
            (("step", "e", (("B", 0, 2),)),),
            (("preempt", "B", (1, 2, 1004), 2),),
            (("resume", "B", 0, (0, 1, 2, 3, 4)),),
            (("finish", "B", (1, 2), "abort", 0),),
        ),
    ),
    "rows that no draft was and that are taken back": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 2),)),),
            (("step", "e", (("A", 2, 1),)),),
            (("step", "e", (("A", 3, 1),)),),
            (("flush",),),
            (("rewind", "A", 2, 0),),
        ),
    ),
    "a draft that is confirmed after its block was forgotten": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 2),)),),
            (("step", "e", (("A", 2, 2),)),),
            (("flush",),),
            (("reset", "e"),),
            (("step", "e", (("A", 4, 1),)),),
        ),
    ),
    "a draft that is confirmed just before it is hit": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 2),)),),
            (("step", "e", (("A", 2, 2),)),),
            (("flush",),),
            (("step", "e", (("A", 4, 1),)),),
            (("begin", "e", "B", "tB", (1, 2, 1004, 1007, 8), 4, 0, (0, 2)),),
            (("step", "e", (("B", 4, 1),)),),
        ),
    ),
    "an abort before the first rows of who shares a block": (
        _BLOCKS_OF_4,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4, 5), 3, 0, (0, 2)),),
            (("step", "e", (("A", 0, 5),)),),
            (("finish", "B", (1, 2, 3, 4, 5), "abort", 3),),
        ),
    ),
    "KV of a prompt that other weights computed": (
        _DECLARED,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 5),)),),
            (("version", 1),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4, 5), 4, 4, (2, 3)),),
            (("step", "e", (("B", 4, 1),)),),
        ),
    ),
    "KV that comes back from a host tier under other weights": (
        _BLOCKS_OF_4._replace(host_blocks=1),
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 5),)),),
            (("copy", "e", (0,), (8,)),),
            (("version", 1),),
            (("finish", "A", (1, 2, 3, 4, 5, 1010), "stop", 5),),
            (("reset", "e"),),
            (("copy", "e", (8,), (2,)),),
            (("begin", "e", "B", "tB", (1, 2, 3, 4, 5), 4, 0, (2, 3)),),
            (("step", "e", (("B", 4, 1),)),),
        ),
    ),
    "a copy of drafts that are confirmed later": (
        _BLOCKS_OF_4._replace(host_blocks=1),
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 2),)),),
            (("step", "e", (("A", 2, 2),)),),
            (("copy", "e", (0,), (8,)),),
            (("step", "e", (("A", 4, 1),)),),
        ),
    ),
    "a late row into a block that was copied since": (
        _BLOCKS_OF_4._replace(host_blocks=1),
        (
            (("begin", "e", "A", "t", (1, 2, 3), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 3),)),),
            (("begin", "e", "B", "tB", (1, 2, 9), 0, 0, (2, 3)),),
            (("step", "e", (("B", 0, 3),)),),
            (("finish", "A", (1, 2, 3, 1006), "abort", 3),),
            (("copy", "e", (0,), (8,)),),
            (("flush",),),
            (("step", "e", (("A", 3, 1),)),),
        ),
    ),
    "KV of which only a part is proven to be of the same tokens": (
        _DECLARED._replace(num_blocks=40),
        (
            (("begin", "e", "A", "t", (*_LONG, 101, 102), 0, 0, tuple(range(17))),),
            (("step", "e", (("A", 0, 66),)),),
            (("begin", "e", "B", "tB", (*_LONG, 103, 104), 65, 65, tuple(range(17, 34))),),
            (("step", "e", (("B", 65, 1),)),),
        ),
    ),
    "KV of a prompt that another trace only inherited": (
        _DECLARED,
        (
            (("begin", "e", "A", "t", (1, 2, 3, 4, 5), 0, 0, (0, 1)),),
            (("step", "e", (("A", 0, 5),)),),
            (("begin", "e", "C", "tC", (1, 2, 3, 4, 5), 4, 0, (0, 2)),),
            (("step", "e", (("C", 4, 1),)),),
            (("flush",), ("delete", "t")),
            (("begin", "e", "B", "tB", (1, 2, 3, 4, 5), 4, 4, (3, 4)),),
            (("step", "e", (("B", 4, 1),)),),
        ),
    ),
    "the turns of a session, of which the second shares its KV with the third": (
        _DECLARED._replace(num_blocks=40),
        (
            (("begin", "e", "A", "t", (1, 2), 0, 0, (0,)),),
            (("step", "e", (("A", 0, 2),)),),
            (("finish", "A", (1, 2, 1004), "stop", 2),),
            (("begin", "e", "B", "t", (1, 2, 1004, *_LONG), 2, 2, tuple(range(1, 18))),),
            (("step", "e", (("B", 2, 65),)),),
            (("begin", "e", "C", "t", (1, 2, 1004, *_LONG, 9), 2, 2, tuple(range(18, 36))),),
            (("step", "e", (("C", 2, 66),)),),
        ),
    ),
}
