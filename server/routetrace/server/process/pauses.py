"""Short pauses of the garbage collector.

A collection walks all objects that are not frozen: 100 ms and more for a server that has just
stored some 10,000 traces. So it is done here between two callbacks of the event loop, after a few
thousand new objects. Otherwise it would lengthen whatever callback comes last, or it would begin in
another thread, and wait for the loop there, which makes objects meanwhile that are not collected.
"""

from __future__ import annotations

import asyncio
import gc
import time

#: New objects, less those that were freed, or processor seconds after which a collection is due:
#: where as many are freed as are made, only the time tells. And seconds between two looks.
_OBJECTS = 2000
_BUSY_SECONDS = 0.02
_LOOK_SECONDS = 0.01

#: Processor seconds of a collection from which on its survivors are frozen.
_LONG_SECONDS = 0.0005


async def collect_garbage() -> None:
    """Collect garbage until cancelled, in place of the interpreter."""
    collect()
    gc.freeze()
    gc.disable()
    last = time.thread_time()
    try:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if gc.get_count()[0] >= _OBJECTS or time.thread_time() - last >= _BUSY_SECONDS:
                collect()
                last = time.thread_time()
    finally:
        gc.enable()


def collect() -> None:
    """Collect garbage; after a long collection, freeze what it has found alive.

    Reference counts alone free frozen objects. So neither objects of the index nor those of calls
    may be part of a reference cycle when they are no longer needed.
    """
    begun = time.thread_time()
    gc.collect()
    if time.thread_time() - begun > _LONG_SECONDS:
        gc.freeze()


def collect_frozen() -> None:
    """Collect garbage among frozen objects, too; takes long, so call it while nothing is served."""
    gc.unfreeze()
    gc.collect()
