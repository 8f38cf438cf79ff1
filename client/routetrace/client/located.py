"""Located: the engine request whose rows a sequence of tokens takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routetrace.common.values import Values


@dataclass(frozen=True)
class Located(Values):
    """Engine request that has the tokens of a sequence, or the first ones of them."""

    trace_id: str
    """The trace's id."""
    incarnation: int
    """Number of the request in the trace, as in `RouteClient.get`."""
    num_tokens: int
    """Tokens of the request, prompt and answer."""
    proven: int
    """Leading tokens of the sequence that digests prove to be the request's: rows behind them are
    of no proven pass."""
    num_equal: int = 1
    """Number of requests that are proven as far; of several, labels, an index or `equal="any"`
    chose this one, or all have rows of the same passes."""

    def num_rows(self, num_tokens: int) -> int:
        """Return how many leading rows a sequence of so many tokens takes from the request."""
        return max(0, min(self.proven, self.num_tokens - 1, num_tokens - 1))


class Locations(list["Located | None"]):
    """Result of `RouteClient.locate`: a `Located` for each sequence, or None.

    Args:
        located: of each sequence.
        ambiguous: indexes of sequences whose request cannot be told from others.
        unsettled: indexes of sequences that are None and may not be when more is reported.
    """

    def __init__(
        self,
        located: Iterable[Located | None] = (),
        ambiguous: Iterable[int] = (),
        unsettled: Iterable[int] = (),
    ) -> None:
        super().__init__(located)
        self.ambiguous = tuple(ambiguous)
        """Indexes of the sequences that several requests have equally: they are None."""
        self.unsettled = tuple(unsettled)
        """Indexes of those that are None and may not be when more requests have ended."""
        others = set(self.ambiguous)
        self.not_found = tuple(i for i, each in enumerate(self) if each is None and i not in others)
        """Indexes of the sequences whose tokens no request has: they are None, too."""

    @property
    def any_of_several(self) -> tuple[int, ...]:
        """Indexes of the sequences for which one of several equal requests was chosen."""
        return tuple(i for i, each in enumerate(self) if each is not None and each.num_equal > 1)
