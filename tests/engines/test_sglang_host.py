"""KV that SGLang copies to host memory and loads again (HiCache): which copies are reported."""

from types import SimpleNamespace

import pytest
import torch

from routetrace.capture_agent.engines.sglang import capture as captures
from routetrace.capture_agent.engines.sglang import plugin
from routetrace.capture_agent.engines.sglang.disaggregation import Role
from routetrace.common.limits import MAX_SLOTS
from support.sglang_capture import capturing, req_of

#: Pages of the device; those of host memory are numbered from here on.
DEVICE = 99


class Pool:
    """As much of SGLang's host pool as is used: slots come from a list, pages in any order."""

    def __init__(self, size=32):
        self.size = size
        self.pages = [5, 2, 7, 0, 1, 3, 4, 6]

    def alloc(self, need_size):
        pages = [self.pages.pop(0) for _ in range(need_size // 4)]
        return slots_of(*pages)


class Controller:
    """As much of SGLang's `HiCacheController` as is used, with the hooks of its methods."""

    def __init__(self, pool, page_size=4):
        self.mem_pool_host, self.page_size = pool, page_size
        plugin._host_made(None, self)

    def write(self, device_indices):
        host = self.mem_pool_host.alloc(len(device_indices))
        plugin._written(host, self, device_indices)
        return host

    def load(self, host_indices, device_indices):
        plugin._loaded(device_indices, self, host_indices=host_indices)


def slots_of(*pages):
    return torch.tensor([4 * page + i for page in pages for i in range(4)])


@pytest.fixture
def scheduler(monkeypatch):
    with capturing(monkeypatch) as scheduler:
        monkeypatch.setattr(plugin, "_capture", scheduler.capture)
        yield scheduler


def told(scheduler):
    """What the agent in use was told of blocks, and of requests that begin."""
    scheduler.capture.flush(0)
    kinds = ("copy_blocks", "mark_external", "begin", "step")
    return [call for call in scheduler.agents[-1].calls if call[0] in kinds]


def compute(scheduler, pages):
    """A pass that computes pages."""
    slots = slots_of(*pages).tolist()
    scheduler.launch((req_of(f"r{pages}", len(slots)), 0, len(slots)), slots=slots).finalize()
    return told(scheduler)[-1]


def test_copies_both_ways_are_reported_in_their_order_with_the_next_pass(scheduler):
    controller = Controller(Pool())
    compute(scheduler, [1, 2])
    before = len(told(scheduler))
    host = controller.write(slots_of(1, 2))
    controller.load(host[4:], slots_of(9))
    controller.write(slots_of(9))
    assert len(told(scheduler)) == before
    b = req_of("b", 9)
    output = scheduler.launch((b, 0, 4), slots=[16, 17, 18, 19])
    host.zero_()  # SGLang's own
    controller.load(slots_of(7), slots_of(8))  # reported with the pass after it
    output.finalize()
    assert told(scheduler)[before:] == [
        ("copy_blocks", [1, 2], [DEVICE + 5, DEVICE + 2]),
        ("copy_blocks", [DEVICE + 2], [9]),
        ("copy_blocks", [9], [DEVICE + 7]),
        ("begin", "b", 0, [4]),
        ("step", [0, 1, 2, 3], [[102, 0, 4]]),
    ]
    compute(scheduler, [3])
    assert told(scheduler)[before + 5] == ("copy_blocks", [DEVICE + 7], [8])


def test_the_agent_that_follows_host_memory_has_its_pages(scheduler, monkeypatch):
    made = []
    make = captures.CaptureAgent
    monkeypatch.setattr(captures, "CaptureAgent", lambda c, **k: made.append((c, k)) or make(c))
    first = scheduler.agents[0]
    Controller(SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=Pool(30))))
    ((config, named),) = made
    assert (config.num_blocks, config.num_host_blocks) == (DEVICE, 8)
    assert named["predecessor"] is first
    Controller(Pool())  # a second one is another memory
    compute(scheduler, [1])
    Controller(Pool())
    assert len(made) == 1


def test_host_slots_that_storage_fills_are_of_nobody(scheduler):
    controller = Controller(Pool())
    compute(scheduler, [1])
    controller.write(slots_of(1))
    fetched = controller.mem_pool_host.alloc(8)
    controller.load(fetched, slots_of(9, 10))
    before = len(told(scheduler))
    compute(scheduler, [3])
    assert told(scheduler)[before : before + 3] == [
        ("copy_blocks", [1], [DEVICE + 5]),
        ("mark_external", [DEVICE + 2, DEVICE + 7]),
        ("copy_blocks", [DEVICE + 2, DEVICE + 7], [9, 10]),
    ]


def test_pages_in_pieces_and_slots_out_of_range_are_unknown(scheduler):
    controller = Controller(Pool())
    compute(scheduler, [1])
    controller.load(torch.tensor([0, 1, 2, 5]), slots_of(9))
    controller.load(slots_of(8), slots_of(9))
    controller.load(slots_of(0, 1), slots_of(9))
    controller.mem_pool_host.alloc = lambda _: torch.tensor([4, 5, 7, 6])
    controller.write(slots_of(1))
    controller.mem_pool_host.alloc = lambda _: slots_of(8)
    controller.write(slots_of(1))
    before = len(told(scheduler))
    compute(scheduler, [3])
    assert told(scheduler)[before:-2] == [
        *[("mark_external", [9])] * 3,
        ("mark_external", [DEVICE + 1]),
    ]


def test_copies_that_are_not_followed_are_kv_from_elsewhere(scheduler):
    shared = Pool()
    shared.shared_allocation_domain = object()
    unfit = [Controller(Pool(), page_size=8), Controller(shared), Controller(Pool(MAX_SLOTS))]
    for controller in unfit:
        host = controller.write(slots_of(1))
        controller.load(host, slots_of(9))
    assert len(scheduler.agents) == 1
    compute(scheduler, [3])
    assert told(scheduler)[:-2] == [("mark_external", [9])] * 3


def test_a_decode_engine_follows_no_host_memory(monkeypatch):
    """It copies KV there for storage alone."""
    with capturing(monkeypatch, Role.DECODE) as decode:
        monkeypatch.setattr(plugin, "_capture", decode.capture)
        controller = Controller(Pool())
        controller.write(slots_of(1))
        compute(decode, [3])
        assert len(decode.agents) == 1
        assert told(decode)[0][0] == "begin"


def test_without_a_capture_copies_are_nobodys(monkeypatch):
    monkeypatch.setattr(plugin, "_capture", None)
    Controller(Pool()).write(slots_of(1))


def test_copies_after_the_end_of_capture_are_not_kept(scheduler):
    controller = Controller(Pool())
    compute(scheduler, [1])
    scheduler.capture.close()
    controller.load(controller.write(slots_of(1)), slots_of(9))
    assert not scheduler.capture._host.take()


def test_what_failed_is_no_copy(scheduler):
    controller = Controller(Pool())
    plugin._written(None, controller, slots_of(1))
    plugin._loaded(None, controller, slots_of(1))
    compute(scheduler, [3])
    assert [call[0] for call in told(scheduler)] == ["begin", "step"]
