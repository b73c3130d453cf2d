"""Finds what belongs to a committed step beside the model: its optimizers, and what goes with all of them."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from memwall.checkpoint.companions import Companions, State
from memwall.checkpoint.discovery import HELPERS, Helpers, find_optimizers, objects_of
from memwall.checkpoint.loop import LoopState
from memwall.checkpoint.reduction import TakenBuckets
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.training_state import (
    divided_parameters,
    encode_objects,
    optimizer_objects,
    random_states,
)
from memwall.checkpoint.variables import Variables
from memwall.torch_internals.autograd import version_of
from memwall.trace.together import models_of

_log = logging.getLogger(__name__)


class Surroundings:
    """Finds a model's optimizers and what goes with them, as they appear, and puts them back in a resumed run.

    Args:
        directory: of the checkpoint, for messages.
        restoration: of the step that the run continues from, which ranks may change; None in a new one.

    Attributes:
        optimizers: what trains the model; () until they have shown themselves.
        variables: names of what the script's loop can reach.
        companions: what goes with the model; looked for where `has_companions`.
        loop: the training loop, as far as it shows itself.
    """

    def __init__(self, directory: str, restoration: Restoration | None) -> None:
        self._directory, self.restoration = directory, restoration
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.variables = Variables()
        self.has_companions = True
        self.companions = Companions()
        self.loop = LoopState(self.companions)
        self._helpers = Helpers(self.variables)
        self._buckets = TakenBuckets()
        self._named: set[str] = set()
        """Names that were told as not committed."""

    def look(self, model: nn.Module) -> None:
        """Finds the optimizers and what goes with them, if they have appeared, and puts them back."""
        objects = objects_of((torch.optim.Optimizer, *HELPERS))
        if not self.optimizers:
            self._find_optimizers(model, objects)
        self._helpers.look(model, self.optimizers, objects)
        if self.restoration is not None:
            if self.optimizers and not self.restoration.has_options:
                self.restoration.restore_options(model, self.optimizers)
            self.restoration.restore_helpers(self._helpers)
        self.look_beside(model)

    def _find_optimizers(self, model: nn.Module, objects: Sequence[object]) -> None:
        """Finds those that are alive: where nothing says where an iteration begins, one."""
        alive = find_optimizers(model, objects)
        if len(alive) > 1:  # those that nothing leads to any more are not there in another process
            alive = find_optimizers(model, objects_of((torch.optim.Optimizer,), without_garbage=True))
        if self.restoration is not None:
            self.optimizers = self.restoration.optimizers_of(model, alive, self.variables)
        elif self.loop.is_open or len(alive) == 1:
            self.optimizers = tuple(alive)

    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer that is about to step first, where none has been found: it was hidden, or one of several.

        Raises:
            StoreError: the checkpoint is of another one.
        """
        self.look(model)
        if self.optimizers:
            return
        if self.restoration is not None:
            self.optimizers = self.restoration.optimizers_of(model, [optimizer], self.variables)
            if not self.optimizers:
                raise self.restoration.is_of_others(model, optimizer)
        else:
            self.optimizers = (optimizer,)
        self.look(model)

    def look_beside(self, model: nn.Module | None) -> None:
        """Finds what goes with the model, and puts it back."""
        if not self.has_companions:
            return
        self.companions.look(model, self.optimizers, self.loop.given)
        if self.restoration is not None and not self.restoration.has_state:
            self.restoration.restore_companions(self.companions)

    def look_now_and_then(self, model: nn.Module) -> None:
        """Finds schedulers and scalers that came later, at some of the commits."""
        self._helpers.look_now_and_then(model, self.optimizers)

    def settle(self, model: nn.Module) -> None:
        """Says that the first update begins: what comes later is named, and not committed."""
        self.look_beside(model)
        self.companions.settle()

    def check_complete(self, restoration: Restoration) -> None:
        """Checks that the script has what the step was made with.

        Raises:
            StoreError: it lacks something, or has more.
        """
        restoration.check_complete(self._helpers, self.companions if self.has_companions else None)

    def take(self) -> State | None:
        """Returns what goes with the model; None where it is of another step than the model is.

        So it is of a model that is stepped first: from now on it is copied.
        """
        beside = self.loop.take_beside()
        if any(version_of(p.tensor) != version for p, version in zip(beside.parts, beside.versions, strict=True)):
            self.companions.copies = True
            return None
        return beside

    def name_uncommitted(self) -> None:
        """Warns once of what cannot be committed."""
        new = [name for name in self.companions.uncommitted if name not in self._named]
        if new:
            self._named.update(new)
            _log.warning(
                "--checkpoint %s does not commit %s; a resumed run begins anew with it; hand what has a state_dict to "
                "memwall.steps(NUM_STEPS, name=object)",
                *(self._directory, "; ".join(new)),
            )

    def encoded(self, model: nn.Module, beside: bytes, state_dict_names: Mapping[str, str]) -> bytes:
        """Returns what of a step is no tensor.

        Args:
            beside: the companions' states.
            state_dict_names: the part that each key of the model's own state dict stands for.
        """
        restored = () if self.restoration is None else self.restoration.objects.get("buckets", ())
        optimizers = [optimizer_objects(model, optimizer, number) for number, optimizer in enumerate(self.optimizers)]
        return encode_objects(
            {
                "models": [self.variables.name_of(each) for each in models_of(model)],
                "optimizer": optimizers[0],
                "further_optimizers": optimizers[1:],
                "optimizers": [self.variables.name_of(each) for each in self.optimizers],
                "helpers": self._helpers.states(),
                "random": random_states(),
                "loop": self.loop.take(),
                "beside": beside if self.has_companions else None,
                "state_dict": state_dict_names,
                "divided": divided_parameters(model),
                "buckets": self._buckets.of(model, restored),
            }
        )
