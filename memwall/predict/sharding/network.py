"""Seconds of collectives of NCCL, from the peak rates of links: a lower bound, and only an estimate.

What rings and trees move, and over how many hops: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
and `ncclTopoGetAlgoTime` in https://github.com/NVIDIA/nccl/blob/v2.21.5-1/src/graph/tuning.cc, from which the seconds
of a hop are, too (`hwLat`, `baseLat`, the simple protocol).
"""

import math
from typing import Literal

from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware
from memwall.machine.node_links import NodeLink

_BASE_SECONDS = 8.4e-6
_PEER_HOP_SECONDS, _PCIE_HOP_SECONDS, _NODE_HOP_SECONDS = 3.4e-6, 5.7e-6, 14.0e-6

Group = Literal["all", "node", "across"]
"""Ranks that take part in a collective: all, those of one node, or one of each node."""


class Network(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes ranks and the links between them."""

    num_ranks: int
    num_ranks_per_node: int
    peer_bytes_per_second: float
    """Between the ranks of one node, for each of them in one direction."""
    peer_hop_seconds: float
    device_bytes_per_second: float
    """To and from a device's own memory."""
    host_bytes_per_second: float
    """Between a device and its host, in one direction."""
    node_bytes_per_second: float | None = None
    """Between nodes, for all adapters of one together in one direction; None where there is one node."""

    @property
    def num_nodes(self) -> int:
        """Returns the nodes that the ranks are on."""
        return -(-self.num_ranks // self.num_ranks_per_node)

    def size(self, group: Group) -> int:
        """Returns the ranks of a group."""
        return {"all": self.num_ranks, "node": min(self.num_ranks_per_node, self.num_ranks), "across": self.num_nodes}[
            group
        ]

    def gather_seconds(self, whole_bytes: int, group: Group = "all") -> float:
        """Returns the seconds of an all-gather, and of a reduce-scatter, of so many bytes in all."""
        num = self.size(group)
        if num < 2 or whole_bytes == 0:
            return 0.0
        num_node_hops = self.num_nodes - 1 if group != "node" else 0
        hops = num_node_hops * _NODE_HOP_SECONDS + (num - 1 - num_node_hops) * self.peer_hop_seconds
        return _BASE_SECONDS + hops + whole_bytes * (num - 1) / num / self._bytes_per_second(group)

    def all_reduce_seconds(self, whole_bytes: int, group: Group = "all") -> float:
        """Returns the seconds of an all-reduce: a reduce-scatter and an all-gather in one, by ring or by tree."""
        once = self.gather_seconds(whole_bytes, group)
        if not once:
            return 0.0
        num, num_nodes = self.size(group), 1 if group == "node" else self.num_nodes
        hops = (num // num_nodes - 1) * self.peer_hop_seconds + math.log2(num_nodes) * _NODE_HOP_SECONDS
        moving = 2 * whole_bytes * (num - 1) / num / self._bytes_per_second(group)
        return min(2 * once - _BASE_SECONDS, _BASE_SECONDS + 2 * hops + moving)

    def _bytes_per_second(self, group: Group) -> float:
        if group == "node" or self.num_nodes == 1 or self.node_bytes_per_second is None:
            return self.peer_bytes_per_second
        if group == "across":  # as many such groups at once as a node has ranks
            return self.node_bytes_per_second / self.size("node")
        return min(self.peer_bytes_per_second, self.node_bytes_per_second)


def network_of(hardware: Hardware, *, num_ranks: int, num_ranks_per_node: int, link: NodeLink | None) -> Network:
    """Returns the network of so many devices; without links between devices of a node, what they have is PCIe.

    Raises:
        UsageError: the ranks are on several nodes and no link between these is named, or nodes are not full.
    """
    if num_ranks > num_ranks_per_node and num_ranks % num_ranks_per_node:
        raise UsageError(
            f"--ranks {num_ranks} with --ranks-per-node {num_ranks_per_node}: the last node would have "
            f"{num_ranks % num_ranks_per_node}; give a multiple"
        )
    if num_ranks > num_ranks_per_node and link is None:
        raise UsageError(
            f"--ranks {num_ranks} with --ranks-per-node {num_ranks_per_node} are on {num_ranks // num_ranks_per_node} "
            "nodes; name the link between them with --link NAME"
        )
    has_peers = hardware.peer_link_bytes_per_second is not None
    return Network(
        num_ranks=num_ranks,
        num_ranks_per_node=num_ranks_per_node,
        peer_bytes_per_second=hardware.peer_link_bytes_per_second or hardware.host_link_bytes_per_second,
        device_bytes_per_second=hardware.memory_bytes_per_second,
        host_bytes_per_second=hardware.host_link_bytes_per_second,
        peer_hop_seconds=_PEER_HOP_SECONDS if has_peers else _PCIE_HOP_SECONDS,
        node_bytes_per_second=None if link is None else link.bytes_per_second,
    )
