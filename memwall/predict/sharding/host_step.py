"""Seconds of Adam on the CPUs of a training node, which no computation on the device hides."""

# Weight, gradient and two moments in float32 are read, all but the gradient written.
_BYTES_PER_ELEMENT = 28
# Two sockets with eight channels of DDR5-4800 each, as of a DGX H100 (Xeon Platinum 8480C):
# https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html. A peak: no step reaches it.
_NODE_BYTES_PER_SECOND = 614.4e9


def host_step_seconds(num_elements: int, num_ranks_per_node: int) -> float:
    """Returns the seconds in which the ranks of a node step so many elements each."""
    return num_elements * num_ranks_per_node * _BYTES_PER_ELEMENT / _NODE_BYTES_PER_SECOND
