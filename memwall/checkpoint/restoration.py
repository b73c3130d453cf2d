"""Puts a new process where another one was: the model first, then its optimizer, its schedulers and its loop."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from memwall.apply.optimizer_state.kept_space import KeepsState
from memwall.apply.optimizer_state.low_bit_form import put_together
from memwall.checkpoint.committed import Committed, Region, Wanted, parameter_of, read_regions, whole_region
from memwall.checkpoint.companions import PREFIX, Companions, holder_of
from memwall.checkpoint.discovery import (
    Helpers,
    find_models,
    find_optimizers,
    find_together,
    objects_of,
    shapes_of,
)
from memwall.checkpoint.reachable import reachable
from memwall.checkpoint.reduction import restore_buckets
from memwall.checkpoint.refusals import of_other_optimizers
from memwall.checkpoint.training_state import (
    Part,
    TensorRecord,
    decode_objects,
    divided_parameters,
    dtype_name,
    is_beside_model,
    low_bit_of,
    names_of_parameters,
    parts_of_model,
    parts_of_optimizer,
    state_records,
)
from memwall.checkpoint.variables import Variables
from memwall.errors import StoreError
from memwall.planning.planfile import Plan, decoded
from memwall.torch_internals.sharding import is_sharded, like_shard, local_part
from memwall.trace.together import TrainedTogether, models_of

_log = logging.getLogger(__name__)


class _Beside(NamedTuple):
    """Holds what went with the model and has not been put back yet."""

    states: dict[str, Any]
    records: dict[str, TensorRecord]
    names: frozenset[str]
    """Names of all of them."""


class Restoration:
    """Puts a committed step back, part by part.

    Args:
        sources: what this process goes on from; where another number of ranks does, then what the other ranks have.
        objects: what of the step is no tensor, for another number of ranks; by default the first one's.

    Attributes:
        has_options, has_state: whether the options of the optimizers, and their state, have been put back.
        model: what the parameters were put back into; None before that.
        objects: the rest of the step; see `memwall.checkpoint.training_state`.
    """

    def __init__(self, sources: Sequence[Committed], objects: Mapping[str, Any] | None = None) -> None:
        self._sources, self._own = sources, sources[0]
        self._directory, self._is_redivided = self._own.journal.directory, objects is not None
        self.objects: Mapping[str, Any] = self._own.objects if objects is None else objects
        self._regions: dict[str, Region] = {}
        """Which part of each divided parameter this process holds."""
        self.model: nn.Module | None = None
        self.has_options = False
        self.has_state = False
        self._is_checked = False
        self._left: list[tuple[str, dict[str, Any]]] = [(name, state) for name, state in self.objects["helpers"]]
        self._beside = self._companions_left()
        if self._own.other_release:
            _log.warning(
                "the run continues from step %d of %s: %s; it goes on, and sums may be rounded otherwise",
                *(self._own.step, self._directory, self._own.other_release),
            )

    @property
    def _maker(self) -> str:
        other = self._own.other_release
        return f"the script that made it, and the release of torch: {other}" if other else "the script that made it"

    @property
    def plan(self) -> Plan | None:
        """Returns the plan under which the step was made; None where another number of ranks goes on from it."""
        if self._own.content.plan is None or self._is_redivided:
            return None
        try:
            return decoded(msgspec.json.decode(self._own.content.plan), Plan)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError) as error:
            raise self._own.written_by_another(error) from error

    def find_model(self, variables: Variables) -> nn.Module | None:
        """Returns what of this process has these parameters; of several modules the only one that is trained."""
        kind = "parameter/"
        records = [record for record in self._own.content.tensors if _is_of_model(record, kind)]
        shapes = {record.name.removeprefix(kind): self._own.whole_shape(record) for record in records}
        named = variables.find_models(self.objects.get("models", ()))
        if named:
            model = named[0] if len(named) == 1 else TrainedTogether(named)
            if shapes_of(model) == shapes:
                return model
        models = find_models(shapes)
        if len(models) > 1:  # copies by moving average, a teacher
            optimizers = objects_of((torch.optim.Optimizer,))
            near = {id(value) for _, value in reachable() if isinstance(value, nn.Module)}
            models = [m for m in models if id(m) in near and len(find_optimizers(m, optimizers)) == 1]
        elif not models:
            groups = self.objects["optimizer"]["groups"]
            return find_together(shapes, [name for group in groups for name in group["parameters"]])
        return models[0] if len(models) == 1 else None

    def in_order(self, model: nn.Module, variables: Variables) -> nn.Module:
        """Returns models that are trained together in the order in which they were committed, where it is known."""
        named = variables.find_models(self.objects.get("models", ()))
        is_same = {*map(id, named)} == {*map(id, models_of(model))}
        return TrainedTogether(named) if is_same and len(named) > 1 else model

    def optimizers_of(
        self, model: nn.Module, alive: Sequence[torch.optim.Optimizer], variables: Variables
    ) -> tuple[torch.optim.Optimizer, ...]:
        """Returns the optimizers that were committed, in their order; () before all of them are there."""
        found: list[torch.optim.Optimizer] = []
        names = self.objects.get("optimizers", [""] * len(self._own.optimizers))
        for number, saved in enumerate(self._own.optimizers):
            fitting = [
                one
                for one in alive
                if one not in found
                and type(one).__qualname__ == saved["class"]
                and _groups_of(model, one, number) == [group["parameters"] for group in saved["groups"]]
            ]
            if len(fitting) > 1:
                fitting = [one for one in fitting if names[number] and variables.name_of(one) == names[number]]
            found += fitting[:1]
        return tuple(found) if len(found) == len(self._own.optimizers) else ()

    @torch.no_grad()
    def restore_model(self, model: nn.Module) -> None:
        """Loads parameters and buffers.

        Raises:
            StoreError: they are another model's.
        """
        parts = parts_of_model(model)
        self._regions = {name: Region(*place) for name, place in divided_parameters(model).items()}
        records = [record for record in self._own.content.tensors if _is_of_model(record, "parameter/", "buffer/")]
        self._check_belongs(records, parts)
        tensors = {part.name: part.tensor for part in parts}
        self._read([(record, tensors[record.name]) for record in records])
        restore_buckets(model, self.objects.get("buckets", ()))
        self.model = model
        _log.info("the run continues from step %d of %s", self._own.step, self._directory)

    @torch.no_grad()
    def restore_options(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Loads the options of the optimizers' groups, and parameters that they train beside the model's."""
        outside: dict[str, Tensor] = {}
        for number, (optimizer, saved) in enumerate(zip(optimizers, self._own.optimizers, strict=True)):
            for group, before in zip(optimizer.param_groups, saved["groups"], strict=True):
                group.update(before["options"])
            outside |= {part.name: part.tensor for part in parts_of_optimizer(model, optimizer, number)}
        beside = [record for record in self._own.content.tensors if record.name in outside and not _is_state(record)]
        self._read([(record, outside[record.name]) for record in beside])
        self.has_options = True

    def is_of_others(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StoreError:
        """Returns the error that says what optimizer the checkpoint has in place of one that begins to step."""
        return of_other_optimizers(self._own.optimizers, optimizer, _groups_of(model, optimizer, 0), maker=self._maker)

    @torch.no_grad()
    def restore_state(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        keeper_of: Callable[[torch.optim.Optimizer], KeepsState | None],
    ) -> None:
        """Loads the optimizers' state: to where it is kept between steps, and in the form in which it is kept.

        Moments that were in 8 bits stay as they are where this process has them so. Where it does not they are opened
        for torch's Adam, which cannot step on them; torchao's own optimizers can.

        Raises:
            StoreError: the bytes cannot be had, or came back different, or there is no room for them.
        """
        with self._own.loading("the state of the optimizers"):
            for number, optimizer in enumerate(optimizers):
                self._restore_state(number, model, optimizer, keeper_of(optimizer))
        self.has_state = True

    def _restore_state(
        self, number: int, model: nn.Module, optimizer: torch.optim.Optimizer, keeper: KeepsState | None
    ) -> None:
        names, saved = names_of_parameters(model, optimizer, number), self._own.optimizers[number]

        def load(chosen: Sequence[Tensor] | None) -> None:
            self._load_state(number, optimizer, names, chosen, keeper)

        if keeper is not None:
            keeper.fill(load)
        load(None)
        # In the order in which it came to be: a state dict lists it so.
        place = {name: number for number, name in enumerate(saved["state"])}
        ordered = sorted(optimizer.state.items(), key=lambda item: place.get(names[id(item[0])], len(place)))
        optimizer.state.clear()
        optimizer.state.update(ordered)

    def _load_state(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        chosen: Sequence[Tensor] | None,
        keeper: KeepsState | None,
    ) -> None:
        """Loads the state of the chosen parameters; by default of those that have none yet."""
        if chosen is None:
            every = (parameter for group in optimizer.param_groups for parameter in group["params"])
            chosen = [parameter for parameter in every if not optimizer.state.get(parameter)]
        saved, parameters = self._own.optimizers[number], {names[id(parameter)]: parameter for parameter in chosen}
        states: dict[str, dict[Any, Any]] = {
            name: dict(rest) for name, rest in saved["state"].items() if name in parameters
        }
        targets: list[tuple[TensorRecord, Tensor]] = []
        divided: list[tuple[str, Any]] = []
        for name, key, record in state_records(self._own.content.tensors, number):
            if name not in parameters:
                continue
            device = torch.device("cpu") if record.is_on_host else parameters[name].device
            like = self._form_of(record, local_part(parameters[name]))
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=getattr(torch, record.dtype), device=device)
            states.setdefault(name, {})[key] = tensor
            targets.append((record, tensor))
            if self._here(record) is not None and is_sharded(parameters[name]):
                divided.append((name, key))
        self._read(targets)
        targets.clear()  # or what is opened would stay in memory beside it
        for name, state in states.items():
            parameter = parameters[name]
            if keeper is None:
                is_kept = not isinstance(optimizer, torch.optim.Adam)
            else:
                is_kept = keeper.keeps_low_bits(parameter)
            put_together(state, low_bit_of(saved, name), is_kept=is_kept)
            for key in [key for of, key in divided if of == name]:
                state[key] = like_shard(state[key], parameter)
            optimizer.state[parameter] = state

    def restore_helpers(self, helpers: Helpers) -> None:
        """Loads the schedulers and scalers that have appeared."""
        if self._left:
            with self._own.loading("the state of schedulers and scalers"):
                self._left = helpers.restore(self._left)

    @torch.no_grad()
    def restore_companions(self, companions: Companions) -> None:
        """Loads what went with the model, as far as it has appeared."""
        if self._beside is None:
            return
        with self._own.loading("the state of what goes with the model"):
            companions.restore(self._beside.states)
        here = {part.name: part.tensor for part in companions.parts()}
        found = [record for name, record in self._beside.records.items() if name in here]
        self._check_belongs(found, [part for part in companions.parts() if part.name in self._beside.records])
        self._read([(record, here[record.name]) for record in found])
        for record in found:
            del self._beside.records[record.name]

    def _companions_left(self) -> "_Beside | None":
        data = self.objects.get("beside")
        if data is None:
            return None
        states = decode_objects(data)
        if states["uncommitted"]:
            _log.warning(
                "the run in %s continues, but begins anew with what was not committed: %s",
                *(self._directory, "; ".join(states["uncommitted"])),
            )
        records = {record.name: record for record in self._own.content.tensors if record.name.startswith(PREFIX)}
        names = {*states["generators"], *states["stateful"], *map(holder_of, records), *states.get("fresh", ())}
        return _Beside(states, records, frozenset(names))

    def _check_companions(self, companions: Companions) -> None:
        if self._beside is None:
            return
        states = self._beside.states
        left = [*states["generators"], *states["stateful"], *map(holder_of, self._beside.records)]
        if left:
            raise StoreError(
                f"the checkpoint in {self._directory} holds the state of '{left[0]}', which this script has "
                f"not made before its first update; resume with {self._maker}"
            )
        new = sorted(companions.names() - self._beside.names)
        if new:
            raise StoreError(
                f"the checkpoint in {self._directory} was made without '{new[0]}', which this script has; "
                f"resume with {self._maker}"
            )

    def check_complete(self, helpers: Helpers, companions: Companions | None = None) -> None:
        """Checks that the script has what the step was made with, no more and no less, before its first update.

        Raises:
            StoreError: it lacks a scheduler, a scaler or what else went with the model, or has another one.
        """
        if self._is_checked:
            return
        if companions is not None:
            self._check_companions(companions)
        if self._left:
            raise StoreError(
                f"the checkpoint in {self._directory} holds the state of a {self._left[0][0]}, which this "
                f"script has not made before its first update; resume with {self._maker}"
            )
        saved = [name for name, _ in self.objects["helpers"]]
        for name in helpers.names():
            if name not in saved:
                raise StoreError(
                    f"the checkpoint in {self._directory} was made without the {name} that this script has; "
                    f"resume with {self._maker}"
                )
            saved.remove(name)
        self._is_checked = True

    def _form_of(self, record: TensorRecord, held: Tensor) -> Tensor:
        """Returns a tensor of the shape and the strides that a tensor of the state has here.

        Args:
            held: what this process holds of its parameter.
        """
        if self._here(record) is not None and tuple(held.shape) != record.shape:
            return held
        return torch.empty_strided(record.shape, record.stride, device="meta")

    def _read(self, targets: Iterable[tuple[TensorRecord, Tensor]]) -> None:
        """Fills tensors with what is recorded of them, or of the part of them that this process holds."""
        read_regions(self._sources, [Wanted(record.name, tensor, self._here(record)) for record, tensor in targets])

    def _here(self, record: TensorRecord) -> Region | None:
        """Returns which part of a tensor this process holds; None where it is whole, here and in the checkpoint."""
        saved, here = self._own.region_of(record), self._regions.get(parameter_of(record))
        if saved is not None:
            return here or whole_region(saved.whole)
        return here if here is not None and here.whole == record.shape else None  # not a counter of steps

    def _whole_shape(self, part: Part) -> tuple[int, ...]:
        kind, _, name = part.name.partition("/")
        region = self._regions.get(name) if kind == "parameter" else None
        return tuple(part.tensor.shape) if region is None else region.whole

    def _check_belongs(self, records: Iterable[TensorRecord], parts: Iterable[Part]) -> None:
        """Checks that the tensors are those of this model; else the error lists the first differences."""
        saved = {record.name: f"{record.dtype} {list(self._own.whole_shape(record))}" for record in records}
        here = {part.name: f"{dtype_name(part.tensor)} {list(self._whole_shape(part))}" for part in parts}
        differences = [
            f"{name.replace('/', ' ')} is {saved.get(name, 'not')} in the checkpoint and {here.get(name, 'not')} here"
            for name in sorted(saved.keys() | here.keys())
            if saved.get(name) != here.get(name)
        ]
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise StoreError(
                f"the checkpoint in {self._directory} is of another model: {'; '.join(differences[:3])}{more}; "
                f"resume with {self._maker}, or give this one a directory of its own"
            )


def _groups_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[list[str]]:
    names = names_of_parameters(model, optimizer, number)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _is_of_model(record: TensorRecord, *kinds: str) -> bool:
    return record.name.startswith(kinds) and not is_beside_model(record.name.partition("/")[2])


def _is_state(record: TensorRecord) -> bool:
    return record.name.startswith("state")
