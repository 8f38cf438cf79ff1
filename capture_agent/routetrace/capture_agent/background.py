"""The background as a process, which `link.py` starts from this file.

Its arguments are for readers of `ps` alone; the rest arrives on stdin.
"""

import pickle
import signal
import sys


def main() -> None:
    """Run a Worker until the engine closes its end of the socket."""
    # Signals that end the engine must not end this process first; it ends after the engine.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.path[:] = pickle.load(sys.stdin.buffer)

    import gc
    import logging
    import mmap
    import os
    import socket

    from routetrace.capture_agent.worker import Worker

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    gc.freeze()  # imported objects live to the end
    config, memory_fd, sock_fd, parent = pickle.load(sys.stdin.buffer)
    memory = mmap.mmap(memory_fd, 0)
    os.close(memory_fd)
    Worker(config, memoryview(memory), socket.socket(fileno=sock_fd), parent).run()


if __name__ == "__main__":
    if not sys.argv[1:2] or not sys.argv[1].startswith("engine_id="):
        sys.exit("routetrace: a capture agent starts this itself; see CaptureAgent")
    main()
