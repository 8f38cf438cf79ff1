"""The format of stored data: what this version cannot read is refused, and stays as it is."""

from __future__ import annotations

import msgpack
import pytest

from routetrace.common.errors import Corrupt
from routetrace.server.core import Core
from routetrace.server.index.records.format import FORMAT, HEAD, PREVIOUS, UnsupportedFormat
from routetrace.server.index.state import State
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore
from support.agents.recorder import records

NEWER = bytes(3) + bytes([FORMAT + 1]) + b"what nobody here can read"
OLDER = msgpack.packb(("head", (PREVIOUS - 1, 7, 3)))


def stored(some: list[bytes]) -> MemoryStore:
    store = MemoryStore()
    for number, record in enumerate(some, 1):
        store.append(Record(number, record, b"")).result()
    return store


def core_of(store: MemoryStore) -> Core:
    return Core(store, ServerConfig(store="memory"))


def test_everything_that_is_written_begins_with_its_format():
    state = State(100)
    state.load(core_of(MemoryStore()).state.dump())
    assert all(record[:4] == HEAD for record in records(0))
    assert all(piece[:4] == HEAD for piece in state.dump())


async def test_a_record_of_a_newer_format_ends_the_start():
    """It is not left out as one that is damaged: its rows are there."""
    some = records(0)
    store = stored([*some[:3], NEWER, *some[3:]])
    core = core_of(store)
    with pytest.raises(UnsupportedFormat, match=rf"format {FORMAT + 1}.*reads formats 4 and 5"):
        await core.start()
    assert not core.ready
    assert [record for _, record in store.headers()][3] == NEWER


@pytest.mark.parametrize(
    ("piece", "number", "remedy"),
    [(NEWER, FORMAT + 1, "that wrote it"), (OLDER, PREVIOUS - 1, f"that writes format {PREVIOUS}")],
)
async def test_a_snapshot_of_another_format_ends_the_start(piece, number, remedy):
    store = stored(records(0))
    store.compact((3, [piece]), ())
    core = core_of(store)
    with pytest.raises(UnsupportedFormat, match=f"format {number}.*{remedy}"):
        await core.start()
    assert store.load_snapshot()[0] == 3


@pytest.mark.parametrize("piece", [b"", HEAD, HEAD + b"\xff", b"{}", b"\x92\xa4head\x01"])
def test_what_is_no_snapshot_is_corrupt(piece):
    state = State(100)
    with pytest.raises(Corrupt):
        state.load([piece])
