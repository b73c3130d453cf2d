"""How many processes train together, as torch.distributed has it; what a launcher said before is `launched`."""

from torch import distributed


def num_processes() -> int:
    """Returns the processes of the script's process group; 1 before there is one."""
    is_one_of_several = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_one_of_several else 1
