"""The format of stored data: what this version cannot read is refused, and stays as it is."""

from __future__ import annotations

import pytest

from routetrace.common.errors import Corrupt
from routetrace.server.core import Core
from routetrace.server.index.records.format import FORMAT, HEAD, UnsupportedFormat
from routetrace.server.index.state import State
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore
from support.agents.recorder import records

NEWER = bytes(3) + bytes([FORMAT + 1]) + b"what nobody here can read"
#: As 0.7 wrote a snapshot, and a record.
OLDER = b"\x92\xa4head\x93\x04\x07\x03"
OLDER_RECORD = b"\x1d\x00\x00\x00" + b'{"kind":"renew","time":1.0,...'


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


@pytest.mark.parametrize(
    ("record", "said"),
    [(NEWER, f"format {FORMAT + 1}.*that wrote it"), (OLDER_RECORD, "before 5.*start .*0.8")],
)
async def test_a_record_of_another_format_ends_the_start(record, said):
    """It is not left out as one that is damaged: its rows are there."""
    some = records(0)
    store = stored([*some[:3], record, *some[3:]])
    core = core_of(store)
    with pytest.raises(UnsupportedFormat, match=said):
        await core.start()
    assert not core.ready
    assert [record for _, record in store.headers()][3] == record


@pytest.mark.parametrize(
    ("piece", "said"),
    [(NEWER, f"format {FORMAT + 1}.*that wrote it"), (OLDER, "before 5.*start .*0.8")],
)
async def test_a_snapshot_of_another_format_ends_the_start(piece, said):
    store = stored(records(0))
    store.compact((3, [piece]), ())
    core = core_of(store)
    with pytest.raises(UnsupportedFormat, match=said):
        await core.start()
    assert store.load_snapshot()[0] == 3


@pytest.mark.parametrize("piece", [b"", HEAD, HEAD + b"\xff"])
def test_what_is_no_snapshot_is_corrupt(piece):
    state = State(100)
    with pytest.raises(Corrupt):
        state.load([piece])
