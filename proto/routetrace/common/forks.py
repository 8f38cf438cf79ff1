"""Keep gRPC usable in processes that fork.

gRPC shuts down in a thread when its last channel is closed. A child that is forked meanwhile hangs
in its first call.
"""

from __future__ import annotations

import grpc

_kept: list[grpc.Channel] = []


def keep_grpc_up() -> None:
    """Keep one unused channel open for the life of this process."""
    if not _kept:
        _kept.append(grpc.insecure_channel("localhost"))  # connects at the first call
