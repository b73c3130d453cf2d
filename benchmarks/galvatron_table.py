"""Galvatron's profile and plan of a model, read, and its choice of layers to checkpoint, made by memwall's solver.

Its "MB" are MiB, and its "GB" GiB. A layer holds its part of the states under ZeRO-3 and its activations, both linear
in what was profiled; each figure is rounded up to a MiB. The embedding and the head are divided beside the layers, by
tensor parallelism of their own. Of a device with more than 20 GiB it leaves a fifth to the allocator.
"""

import math
from typing import Any

from msgspec import Struct

from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.instance import BlockOptions, Instance, Option, Row
from memwall.planning.solver.solve import solve

__all__ = ["LayerTable", "TheirPlan", "read_plan", "read_table", "reserved_mib"]

_MIB = 1 << 20
_CONTEXT_MIB = 1024
_RESERVED_SHARE, _RESERVED_ABOVE_MIB = 0.2, 20 * 1024
_STATES_PER_PARAMETER = 4  # parameter, gradient and both moments of Adam
_SHARE_ABOVE_EQUAL = 0.003  # that ZeRO-3 holds above an equal part
_BACKWARD_BY_FORWARD = 2.0
_ZERO_3 = "1"


class TheirPlan(Struct, frozen=True, kw_only=True):
    """Holds a plan of Galvatron's: data parallelism by ZeRO-3 in all layers, and what it checkpoints."""

    checkpointed: tuple[bool, ...]
    """Whether each layer is checkpointed, in order of forward."""
    global_batch: int
    vocabulary_ranks: int
    """Ranks among which the embedding and the head are divided by tensor parallelism."""


class LayerTable(Struct, frozen=True, kw_only=True):
    """Holds a rank's bytes and seconds of a layer as Galvatron counts them, for one batch and number of devices."""

    num_layers: int
    kept_mib: int
    """States and activations of a layer that keeps them."""
    checkpointed_mib: int
    other_mib: int
    """Embedding, head and context."""
    forward_seconds: float
    """One forward of a layer, which checkpointing adds to a step."""

    def needed_mib(self, num_checkpointed: int) -> int:
        """Returns what a rank holds with so many layers checkpointed."""
        num_kept = self.num_layers - num_checkpointed
        return self.other_mib + num_kept * self.kept_mib + num_checkpointed * self.checkpointed_mib

    def seconds(self, num_checkpointed: int) -> float:
        """Returns the layers' seconds of a step, without communication."""
        return self.forward_seconds * (self.num_layers * (1 + _BACKWARD_BY_FORWARD) + num_checkpointed)

    def num_checkpointed(self, limit_mib: int) -> int | None:
        """Returns how many layers memwall's solver has to checkpoint below a limit; None where nothing fits."""
        options = (
            Option(name="keep", extra_seconds=0.0, moved_bytes=0),
            Option(name="full", extra_seconds=self.forward_seconds, moved_bytes=0),
        )
        block = BlockOptions(
            path="",
            options=options,
            forward_seconds=self.forward_seconds,
            backward_seconds=_BACKWARD_BY_FORWARD * self.forward_seconds,
        )
        held = (self.kept_mib * _MIB, self.checkpointed_mib * _MIB)
        instance = Instance(
            blocks=(block,) * self.num_layers,
            rows=(Row(label="step", fixed_bytes=self.other_mib * _MIB, held=(held,) * self.num_layers),),
            budget_bytes=limit_mib * _MIB,
            link=None,
        )
        choice = solve(instance)
        if choice is None:
            return None
        assert evaluate(instance, choice.options).fits
        return sum(choice.options)


def read_plan(plan: dict[str, Any]) -> TheirPlan:
    """Returns a plan from its file's object.

    Raises:
        ValueError: it has pipeline stages, several micro-batches, or layers that are divided in another way.
    """
    layers = plan["checkpoint"].split(",")
    is_known = (plan["pp_deg"], plan["chunks"], plan["embed_sdp"]) == (1, 1, 1)
    if (
        not is_known
        or set(plan["tp_sizes_enc"].split(",")) != {"1"}
        or set(plan["dp_types_enc"].split(",")) != {_ZERO_3}
    ):
        raise ValueError("only plans of one stage and one micro-batch, with ZeRO-3 alone in every layer, are read")
    return TheirPlan(
        checkpointed=tuple(layer == "1" for layer in layers),
        global_batch=plan["global_bsz"],
        vocabulary_ranks=plan["vtp"],
    )


def read_table(
    memory: dict[str, Any], computation: dict[str, Any], plan: TheirPlan, *, num_devices: int, length: int
) -> LayerTable:
    """Returns a rank's table for a plan's batch from the objects of both profiles.

    Args:
        length: tokens of a sample.
    """
    layer, other = memory["layertype_0_sp"][str(length)], memory["other_memory_pp_off_sp"][str(length)]
    batch = plan.global_batch // num_devices
    states = _STATES_PER_PARAMETER * layer["parameter_size"] * _share(num_devices)
    activations = layer["tp_activation_per_bsz_dict"]
    vocabulary = str(plan.vocabulary_ranks)
    others = other["model_states"][vocabulary] * _share(num_devices // plan.vocabulary_ranks)
    others += other["activation"][vocabulary] * batch * plan.vocabulary_ranks
    milliseconds = computation[f"layertype_0_bsz{batch}_seq{length}"] * batch
    return LayerTable(
        num_layers=len(plan.checkpointed),
        kept_mib=math.ceil(states + activations["1"] * batch),
        checkpointed_mib=math.ceil(states + activations["checkpoint"] * batch),
        other_mib=math.ceil(others + _CONTEXT_MIB),
        forward_seconds=milliseconds / 1000,
    )


def reserved_mib(budget_mib: int) -> int:
    """Returns what Galvatron leaves to the allocator of a budget."""
    return int(_RESERVED_SHARE * budget_mib) if budget_mib > _RESERVED_ABOVE_MIB else 0


def _share(num_ranks: int) -> float:
    return 1 / num_ranks + _SHARE_ABOVE_EQUAL
