"""Passes and events in the order in which SGLang launched and decided them.

With overlap scheduling SGLang launches a pass before the results of the last one are there, and in
between decides about ends, retractions, flushes. An agent needs these in the order of launch. So an
event waits for the passes that were launched before it, and for no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Event = Callable[[], None]


class Timeline:
    """Order of the passes under way, and of the events after each.

    Args:
        post: makes the calls that it gets, in their order.
    """

    def __init__(self, post: Callable[[Event], object]) -> None:
        self._post = post
        self._passes: deque[tuple[object, list[Event]]] = deque()

    def launch(self, token: object) -> None:
        """Add a pass, named by any object."""
        self._passes.append((token, []))

    def add(self, event: Event) -> None:
        """Post `event` once the passes launched so far have arrived."""
        if self._passes:
            self._passes[-1][1].append(event)
        else:
            self._post(event)

    def arrive(self, token: object, deliver: Event) -> None:
        """Post the delivery of a pass whose rows have arrived, and the events after it.

        Raises:
            RuntimeError: if the pass is not the first one under way.
        """
        if not self._passes or self._passes[0][0] is not token:
            raise RuntimeError("a pass arrived out of order")
        self._post(deliver)
        for event in self._passes.popleft()[1]:
            self._post(event)

    def clear(self) -> list[Event]:
        """Forget the passes under way; return the events that waited for them."""
        events = [event for _, after in self._passes for event in after]
        self._passes.clear()
        return events
