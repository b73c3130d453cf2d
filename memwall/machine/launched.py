"""Reads what the launcher of this process says of it: which one of how many it is, here and in all.

torchrun, accelerate and deepspeed say so by the same variables, srun and mpirun by their own. Those that sbatch sets
for a whole allocation do not count: a process that it starts without srun is alone.
"""

import os
import re
from collections.abc import Mapping

from msgspec import Struct

_NUM_RANKS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_NUM_LOCAL = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class Launched(Struct, frozen=True, kw_only=True):
    """Names one process of a launcher's."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    """Processes of the same launcher on this host."""
    by_launcher: bool
    """Whether a launcher waits for it, which takes any exit status but 0 for a failure of the job."""


def launched(environment: Mapping[str, str] | None = None) -> Launched:
    """Returns what the environment says; of a process that nobody launched, that it is the only one.

    >>> launched({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}).num_local_ranks
    4
    >>> of_srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    >>> launched(of_srun | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    Launched(rank=5, num_ranks=8, local_rank=1, num_local_ranks=4, by_launcher=True)
    >>> launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}).num_ranks
    1
    """
    found = os.environ if environment is None else environment
    num_ranks = max(1, _first(found, _NUM_RANKS, 1))
    return Launched(
        rank=_first(found, _RANK, 0),
        num_ranks=num_ranks,
        local_rank=_first(found, _LOCAL_RANK, 0),
        num_local_ranks=max(1, _first(found, _NUM_LOCAL, 1)),
        by_launcher=(num_ranks > 1 and any(name in found for name in _LOCAL_RANK)) or "TORCHELASTIC_RUN_ID" in found,
    )


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """Returns the number that the first of these variables begins with; of srun's list of nodes that of the first."""
    values = (re.match(r"\d+", environment.get(name, "")) for name in names)
    return next((int(value.group()) for value in values if value is not None), default)
