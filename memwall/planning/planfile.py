"""The plan as a file: deterministic JSON, so that equal inputs give equal bytes and a hash names a plan."""

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import msgspec
from msgspec import Struct

from memwall.errors import PlanError
from memwall.machine.launched import launched
from memwall.planning.action import Action
from memwall.planning.forecast import Forecast
from memwall.planning.ranks.frontends import (
    accelerate_reducing_each,
    accelerate_sharding,
    in_kept_precision,
    trainer_reducing_each,
    trainer_sharding,
)
from memwall.planning.technique import technique_of, techniques
from memwall.versioned_files import FileKind, json_bytes, whole_file

_KIND = FileKind(
    noun="plan", schema="memwall.plan", version=2, error=PlanError, way_out="make the plan again with `memwall plan`"
)


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds an ordered set of actions with forecast, margin and provenance.

    Example:
        >>> from memwall.planning.forecast import PeakBytes
        >>> forecast = Forecast(
        ...     device="cpu", source="recorded", fits=True, budget_bytes=2, margin_bytes=0,
        ...     peak=PeakBytes(allocated_bytes=1, process_bytes=1), phases={}, step_seconds=None, not_modelled=(),
        ... )
        >>> plan = Plan(model_fingerprint="ab", trace_hash="cd", micro_batch=1, num_micro_batches=1, forecast=forecast)
        >>> plan.actions, len(plan.plan_hash)
        ((), 64)
    """

    schema: Literal["memwall.plan/2"] = "memwall.plan/2"
    model_fingerprint: str
    trace_hash: str
    """SHA-256 of the encoded trace the plan was made from."""
    micro_batch: int
    num_micro_batches: int
    forecast: Forecast

    @property
    def actions(self) -> tuple[Action, ...]:
        """Returns what the plan does, in the order it is applied."""
        return self.forecast.actions

    @property
    def batch_parts(self) -> tuple[int, int]:
        """Returns micro-batch and number of micro-batches of a step under the plan."""
        for action in self.actions:
            parts = technique_of(action).batch_parts(action)
            if parts is not None:
                return parts
        return self.micro_batch, self.num_micro_batches

    @property
    def plan_hash(self) -> str:
        """Returns the SHA-256 over the file's bytes."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        """Returns the bytes of the plan file: sorted keys, integers for bytes, indented for reading and diffing."""
        return json_bytes(self)

    def save(self, path: str | Path) -> None:
        """Writes the plan file.

        Raises:
            PlanError: the file cannot be written.
        """
        with whole_file(Path(path), noun="plan", error=PlanError) as file:
            file.write(self.encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan file; of one for unlike ranks, the plan of this rank.

        Raises:
            PlanError: no such file, cut short, not a plan, of another version, for another number of ranks, or with an
                unknown or mistyped field; the message names the file and the path inside it.
        """
        return _KIND.read_json(Path(path), lambda found: decoded(_of_this_rank(found, path), cls))

    def accelerate_kwargs(self) -> dict[str, Any]:
        """Returns arguments for `Accelerator(**plan.accelerate_kwargs())`: precision, accumulation, FSDP2 for ranks.

        Raises:
            UsageError: what divides the model is nothing that Accelerate takes so.
        """
        kwargs = accelerate_sharding(self.forecast.ranks)
        for action in self.actions:
            kwargs |= technique_of(action).accelerate_kwargs(action)
        return accelerate_reducing_each(self.forecast.ranks, kwargs)

    def training_arguments(self, args: Any) -> Any:
        """Returns a copy of `transformers.TrainingArguments` (or a subclass) with what the plan needs set in it.

        Micro-batch, accumulation and precision, and for ranks FSDP2; everything else of the plan is applied by
        `MemwallCallback(plan=...)`.

        Raises:
            UsageError: what divides the model is nothing that the Trainer takes so.
        """
        changes = sharding = trainer_sharding(self.forecast.ranks)
        for action in self.actions:
            changes = changes | technique_of(action).training_arguments(action)
        made = dataclasses.replace(args, **trainer_reducing_each(self.forecast.ranks, changes, args))
        return in_kept_precision(made) if sharding else made

    def deepspeed_config(self, **settings: Any) -> dict[str, Any]:
        """Returns the configuration under which DeepSpeed does its part of the plan.

        What DeepSpeed has nothing for stays memwall's: `memwall.integrations.apply_rest` applies it.
        """
        from memwall.planning.deepspeed import deepspeed_config

        return deepspeed_config(self, **settings)


class _RankPlans(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds plans for ranks of several kinds."""

    schema: Literal["memwall.plan/2"] = "memwall.plan/2"
    plan_of_rank: tuple[int, ...]
    """Index into `plans` for each rank."""
    plans: tuple[Any, ...]


def save_for_ranks(path: Path, plans: Sequence[Plan]) -> None:
    """Writes the plans of ranks, in the order of their numbers: one plan file where all are equal.

    Raises:
        PlanError: the file cannot be written.
    """
    distinct = list({plan.plan_hash: plan for plan in plans}.values())
    if len(distinct) == 1:
        distinct[0].save(path)
        return
    hashes = [plan.plan_hash for plan in distinct]
    whole = _RankPlans(plan_of_rank=tuple(hashes.index(plan.plan_hash) for plan in plans), plans=tuple(distinct))
    with whole_file(path, noun="plan", error=PlanError) as file:
        file.write(json_bytes(whole))


def _of_this_rank(found: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Returns the object of one plan; rank 0's where this process is of no launcher's."""
    if "plans" not in found:
        return found
    whole, here = msgspec.convert(found, _RankPlans), launched()
    num_ranks = len(whole.plan_of_rank)
    if here.num_ranks not in (1, num_ranks):
        raise PlanError(
            f"{path} holds plans for {num_ranks} ranks, and there are {here.num_ranks}; plan for these anew"
        )
    own = whole.plan_of_rank[here.rank] if here.rank < num_ranks else -1
    if not 0 <= own < len(whole.plans):
        raise msgspec.ValidationError(f"no plan for rank {here.rank} - at `$.plan_of_rank`")
    plan: dict[str, Any] = msgspec.convert(whole.plans[own], dict[str, Any])
    return plan


R = TypeVar("R", bound=Struct)


def decoded(found: dict[str, Any], kind: type[R]) -> R:
    """Returns a record that has a forecast, from the values of its file; each action gets its technique's record.

    Raises:
        msgspec.ValidationError: a field is unknown or of another type, or no technique has an action's kind; the
            message ends with the path inside the file.
    """
    forecast = found.get("forecast")
    values = forecast.get("actions", ()) if isinstance(forecast, dict) else None
    if not isinstance(forecast, dict) or not isinstance(values, list | tuple):
        return msgspec.convert(found, kind)
    known: Any = reduce(or_, (technique.record for technique in techniques()))
    try:
        actions = msgspec.convert(values, tuple[known, ...])
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(str(error).replace("`$", "`$.forecast.actions")) from error
    record: Any = msgspec.convert(found | {"forecast": forecast | {"actions": ()}}, kind)
    return cast(R, msgspec.structs.replace(record, forecast=msgspec.structs.replace(record.forecast, actions=actions)))
