"""The parameters that FSDP2 gathers in each step: autograd saves views of them, which are neither kept nor moved.

They are freed when their unit has run and gathered again for its backward, by emptying and filling the same storage.
Whatever moved the bytes would copy what the next gather brings anyway, and read what has been freed meanwhile.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from memwall.torch_internals.sharding import gathered_parameters, gathers_ahead, is_sharding_unit
from memwall.torch_internals.storages import identity_of


class Gathered:
    """Knows the gathered parameters of models, as soon as each unit has run once."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._waiting = [module for root in roots for module in root.modules() if is_sharding_unit(module)]
        self._units = tuple(self._waiting)
        self._known: dict[int, tuple[nn.Module, Tensor]] = {}

    @property
    def tensors(self) -> list[tuple[nn.Module, Tensor]]:
        """Returns one tensor for each storage, which may be empty now, with the unit that gathers it."""
        self._look()
        return list(self._known.values())

    @property
    def gather_the_next(self) -> bool:
        """Returns whether units gather the next one in backward, and the script has said nothing else."""
        return not any(gathers_ahead(unit) for unit in self._units)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is a gathered parameter, or a view of one."""
        if not self._waiting and not self._known:
            return False
        self._look()
        return identity_of(tensor.untyped_storage()) in self._known

    def _look(self) -> None:
        for unit in list(self._waiting):
            found = gathered_parameters(unit)
            if found is not None:
                self._known |= {identity_of(whole.untyped_storage()): (unit, whole) for whole in found}
                self._waiting.remove(unit)
