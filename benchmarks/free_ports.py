"""Ports that nobody listens at, for ranks that meet on this host."""

import random
import socket

__all__ = ["free_port", "meeting_place"]

_PORTS = range(16384, 32768)
"""Below those that Linux gives to whoever asks for any: between this answer and its use, no connection takes one."""


def free_port() -> int:
    """Returns a port that is free now."""
    draw = random.SystemRandom()  # scripts that seed the other one would all get the same
    while True:
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # somebody listens there
            return port


def meeting_place(num_ranks: int) -> dict[str, str]:
    """Returns the variables by which so many ranks of this host find each other, as torchrun sets them."""
    count = str(num_ranks)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**place, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
