"""Seconds of collectives, against the formulas that NCCL's own tests are read by."""

import pytest
from sharded_runs import network_for

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.machine.node_links import link_named
from memwall.predict.sharding.network import network_of

GIB = 1 << 30


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_bus_bandwidth_within_a_node_is_the_links(num_ranks: int) -> None:
    """GIVEN much to move THEN size / time x (n - 1) / n, twice that of an all-reduce, is what a link carries."""
    network, share = network_for(num_ranks), (num_ranks - 1) / num_ranks
    assert GIB / network.gather_seconds(GIB) * share == pytest.approx(100e9, rel=1e-2)
    assert GIB / network.all_reduce_seconds(GIB) * 2 * share == pytest.approx(100e9, rel=1e-2)


def test_adapters_bind_between_nodes() -> None:
    """GIVEN 40 GB/s for a node of 8 THEN all ranks share it, and groups of one of each node an eighth each."""
    network = network_for(16)
    assert network.gather_seconds(GIB) == pytest.approx(GIB * 15 / 16 / 40e9, rel=1e-2)
    assert network.gather_seconds(GIB, "across") == pytest.approx(GIB / 2 / 5e9, rel=1e-2)
    assert network.gather_seconds(GIB, "node") == pytest.approx(GIB * 7 / 8 / 100e9, rel=1e-2)


def test_small_collectives_take_longer_the_more_ranks_there_are() -> None:
    assert network_for(512).all_reduce_seconds(1024) > 2 * network_for(16).all_reduce_seconds(1024)
    assert network_for(1).gather_seconds(GIB) == 0


def test_nodes_are_full_and_linked() -> None:
    hardware = hardware_named("h100-80gb")
    with pytest.raises(UsageError, match=r"are on 2 nodes; name the link between them with --link NAME"):
        network_of(hardware, num_ranks=16, num_ranks_per_node=8, link=None)
    with pytest.raises(UsageError, match=r"the last node would have 4; give a multiple"):
        network_of(hardware, num_ranks=12, num_ranks_per_node=8, link=link_named("dgx-h100"))
    with pytest.raises(UsageError, match=r"closest are infiniband-ndr"):
        link_named("infiniband-nd")


def test_every_link_has_a_source() -> None:
    for name in ("dgx-h100", "dgx-a100", "aws-p5", "aws-p4d", "infiniband-ndr", "infiniband-hdr", "ethernet-10g"):
        assert "https://" in link_named(name).source
