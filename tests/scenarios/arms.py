"""How a script of the corpus is trained: plainly, under each technique alone, under the planner's own choice; and how
that came out."""

import hashlib
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plans import plan_of

import memwall
from memwall.planning.action import Action
from memwall.planning.techniques.gradient_release import GradientRelease
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.recompute import Recompute
from scenarios.corpus import Scenario, Script
from scenarios.own_choice import planner_choosing

WINDOW_BYTES, MIN_BYTES = 4 << 20, 256


@dataclass
class Result:
    """What training left."""

    losses: list[float]
    digest: str
    lost: dict[tuple[str, str], str] = field(default_factory=dict)
    """Actions that were dropped in the run, and why."""

    def differences(self, other: "Result") -> str:
        """Returns what differs from another run, bit by bit; "" if nothing does."""
        pairs = zip(self.losses, other.losses, strict=True)
        parts = [f"loss {n}: {a} and {b}" for n, (a, b) in enumerate(pairs) if a != b]
        if self.digest != other.digest:
            parts.append("weights or buffers")
        return "; ".join(parts)


def _recompute(block: str) -> list[Action]:
    return [Recompute(block=block)]


def _offload(block: str) -> list[Action]:
    return [Offload(block=block, scope="saved", tier="disk", min_bytes=MIN_BYTES, window_bytes=WINDOW_BYTES)]


def _offload_inputs(block: str) -> list[Action]:
    leave = Offload(block=block, scope="inputs", tier="disk", min_bytes=MIN_BYTES, window_bytes=WINDOW_BYTES)
    return [Recompute(block=block), leave]


def _state(blocks: tuple[str, ...]) -> list[Action]:
    return [OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=1 << 15, min_bytes=MIN_BYTES)]


def _parameters(blocks: tuple[str, ...]) -> list[Action]:
    placement = ParameterPlacement(
        tier="disk", blocks=blocks, window_bytes=1 << 14, min_bytes=MIN_BYTES, written_bytes=0
    )
    return [placement, *_state(blocks)]


def _release(blocks: tuple[str, ...]) -> list[Action]:
    return [GradientRelease(window_bytes=1 << 13)]


def _each(action_of: Callable[[str], list[Action]]) -> Callable[[tuple[str, ...]], list[Action]]:
    return lambda blocks: [action for block in blocks for action in action_of(block)]


TECHNIQUES: dict[str, Callable[[tuple[str, ...]], list[Action]]] = {
    "recompute": _each(_recompute),
    "offload": _each(_offload),
    "offload-inputs": _each(_offload_inputs),
    "state-on-disk": _state,
    "parameters-on-disk": _parameters,
    "gradient-release": _release,
}
REFUSED = {
    "gradient-release": (
        "stepping within backward is for loops whose steps are all alike|the optimizer step within backward, which "
        "cannot be done here|none of its gradients came by way of a plain backward"
    )
}
"""By technique, the errors that end a script it is not for. A recording says so, and these plans are made without."""
CHOICES = {"planner's choice at 70 %": 0.7, "planner's least": 0.0}
"""By name, what part of the recorded step's bytes the planner gets; never less than the least that has a plan."""
ARMS = (*TECHNIQUES, *CHOICES)


def train(scenario: Scenario, arm: str | None, disk: Path) -> Result:
    """Trains a scenario from the same seeds, in the arm's way or plainly."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    script = scenario.build()
    losses: list[float] = []
    if arm is None:
        losses.extend(float(script.step(number)) for number in range(scenario.num_steps))
        return Result(losses, _digest(script))
    with ExitStack() as closing:
        if arm in CHOICES:
            closing.enter_context(planner_choosing(CHOICES[arm]))
            way: dict[str, Any] = {"budget": "64GiB"}
        else:
            way = {"plan": plan_of(script.model, *TECHNIQUES[arm](scenario.blocks))}
        session = closing.enter_context(memwall.fit(script.model, list(script.optimizers), disk=str(disk), **way))
        losses.extend(float(script.step(number)) for number in range(scenario.num_steps))
    return Result(losses, _digest(script), dict(session.measured.lost))


def _digest(script: Script) -> str:
    digest = hashlib.sha256()
    for module in (script.model, *script.others):
        for name, tensor in sorted((*module.named_parameters(), *module.named_buffers())):
            digest.update(name.encode())
            dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
            digest.update(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
