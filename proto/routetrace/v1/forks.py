"""What keeps gRPC well in a process that forks.

gRPC shuts itself down when its last channel goes, in a thread of its own, and a child that is
forked meanwhile hangs in its first call.
"""

from __future__ import annotations

import grpc

_kept: list[grpc.Channel] = []


def keep_grpc_up() -> None:
    """Keeps a channel that nobody uses, for as long as this process lives."""
    if not _kept:
        _kept.append(grpc.insecure_channel("localhost"))  # which connects at the first call
