"""Mistakes of engines that report to an agent: the class of each error, and every word of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from routetrace.capture_agent import CaptureAgent
from support.mistakes import Case, World, check, config, world

# Names that messages show.
LAYOUT_CLASS = "ModelLayout"
FROM_CONFIG = "ModelLayout.from_config"
LINGER = "linger_seconds"

IA = "InvalidArgument"


@pytest.fixture(scope="module")
def things() -> Iterator[World]:
    with world() as made:
        yield made


def unreached(w: World) -> object:
    with CaptureAgent(config(target=w.dead)) as agent:
        return agent.flush(5)


def connected(w: World) -> object:
    with CaptureAgent(config(target=w.dead)) as agent:
        agent.flush(5)
        return agent.stats().connected  # type: ignore[attr-defined, unused-ignore]


def prompt_len(w: World) -> object:
    w.agent.begin("prompted", prompt_token_ids=[5, 6, 7])
    assert w.agent.flush(20)
    return w.client.stat("prompted").prompt_len


# fmt: off
CASES = [
    Case(63, "agent-host-alone", lambda w: config(target="localhost").target, "", "localhost:7411"),
    Case(63, "agent-target-is-int", lambda w: config(target=5), IA,
         "target is 5 (int); expected str host:port"),
    Case(64, "layout-is-str", lambda w: config(layout="qwen"), IA,
         f"layout is a str; expected {LAYOUT_CLASS}; use {FROM_CONFIG}(config)"),
    Case(65, "queue-bytes-is-str", lambda w: config(queue_bytes="1MiB"), IA,
         "queue_bytes is '1MiB' (str); expected int; sizes as text only on the command line"),
    Case(65, "linger-is-str", lambda w: config(**{LINGER: "1"}), IA,
         re.compile(rf"{LINGER} is '1' \(str\); expected .+")),
    Case(66, "shard-without-boot-id", lambda w: config(shard="pp0"), IA,
         "boot_id is ''; expected an id, required with shard='pp0'; give the same id at all "
         "shards"),
    Case(67, "nothing-to-flush", unreached, "", True),
    Case(67, "not-connected", connected, "", False),
    Case(68, "prompt-len-of-tokens", prompt_len, "", 3),
    Case(69, "handle-is-str", lambda w: w.agent.finish("s1", 5), IA,
         "handle is 's1' (str); expected the value of begin() for a running request"),
    Case(69, "handle-is-unknown", lambda w: w.agent.finish(77, 5), IA,
         "handle is 77; expected the value of begin() for a running request"),
    Case(69, "handle-of-a-span-is-unknown", lambda w: w.agent.skip([(77, 0, 1)]), IA,
         "spans[0][0] is 77; expected the value of begin() for a running request"),
    Case(14, "close-timeout-is-str", lambda w: w.agent.close("x"), IA,
         "timeout is 'x' (str); expected a number of seconds"),
    Case(15, "flush-timeout-is-nan", lambda w: w.agent.flush(float("nan")), IA,
         "timeout is nan; expected a finite number of seconds in [0, 31536000]"),
    Case(65, "unknown-field", lambda w: CaptureAgent(linger_second=1), IA,  # type: ignore[arg-type]
         re.compile(r"CaptureAgent\(\) got an unexpected keyword argument 'linger_second'; did you "
                    r"mean 'linger_seconds'\? expected one of target, .+")),
    Case(65, "spill-dir-is-empty", lambda w: config(spill_dir=""), IA,
         "spill_dir is ''; expected a directory that can be written to; leave it out, or give "
         "None, to keep chunks in memory"),
    Case(70, "version-is-str", lambda w: w.agent.set_weight_version("3"), IA,
         "version is '3' (str); expected int"),
    Case(71, "version-is-float", lambda w: w.agent.set_weight_version(1.5), IA,
         "version is 1.5 (float); expected int"),
]
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_mistake_is_told(case: Case, things: World) -> None:
    check(case, things)
