"""Ports that nobody listens at, for ranks that meet on this host."""

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
