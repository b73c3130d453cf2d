"""Ranks that tests and benchmarks start meet at a port that nobody else gets."""

import socket
from pathlib import Path

import free_ports
import pytest


def test_a_port_that_somebody_listens_at_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_ports.free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(free_ports, "_PORTS", [taken.getsockname()[1]] * 9 + [free])
        assert free_ports.free_port() == free


def test_no_port_is_one_that_the_system_gives_to_a_connection() -> None:
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first < free_ports._PORTS.stop:
        pytest.skip("this system gives ports away from a lower number on")
    assert all(free_ports.free_port() < first for _ in range(20))
