"""A plan in effect: every action's handler, applied in order and undone in reverse.

Adding a technique adds a handler here; `HANDLERS` names the one of each action record.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from memwall.apply.allocator import AllocatorHandler
from memwall.apply.cuda_setting import require_cuda_setting
from memwall.apply.effect.effect import Effects
from memwall.apply.effect.watch import effects_of
from memwall.apply.executor import BlockExecutor, resolve_blocks
from memwall.apply.kernels.patched import PatchedKernels, apply_kernels
from memwall.apply.microbatch import MicroBatches
from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.packed import check_can_pack
from memwall.apply.offload.parking import open_engine
from memwall.apply.optimizer_state.keeper import StateKeeper
from memwall.apply.precision import LowerPrecision
from memwall.apply.streaming.keeper import ParameterKeeper
from memwall.errors import ApplyError, MemwallError
from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.kernels import FusedKernels
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.rebuild import Rebuild
from memwall.planning.techniques.recompute import Recompute
from memwall.trace.modules import root_names
from memwall.trace.optimizers import joint_name

__all__ = ["HANDLERS", "AppliedPlan"]


class AppliedPlan:
    """Applies a plan to a model; `undo` leaves no trace of it.

    Args:
        model: the root the plan was made for.
        optimizers: what steps it, as far as it is known yet, see `add_optimizer`.
        keeper: holds the optimizer's state, which may be on disk already.
        parameters: holds the model's parameters, which may be on disk already.
        block_order: paths of all blocks in forward order, so that a block can be read back while the next one runs
            its backward; () where only the plan is known, then blocks with an action count.
        is_cooperative: whether the loop takes its micro-batches from the session.
        is_running: whether the model's forward is being called right now, by a hook before it.
        set_by_loop: records of actions that the training loop carries out itself; they are left to it.
        host_limit_bytes: of a model on CUDA, the most host memory to take; None on a CPU.

    Raises:
        ApplyError: an action cannot be applied here; nothing has changed then.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        block_order: tuple[str, ...],
        disk: str | None,
        disk_capacity_bytes: int | None,
        allocator: AllocatorHandler,
        micro: MicroBatches,
        keeper: StateKeeper,
        parameters: ParameterKeeper,
        is_cooperative: bool,
        is_running: bool = False,
        set_by_loop: tuple[type, ...] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        host_limit_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.disk, self.disk_capacity_bytes = disk, disk_capacity_bytes
        self.host_limit_bytes = host_limit_bytes
        self.allocator, self.micro, self.is_cooperative = allocator, micro, is_cooperative
        self.is_running, self.set_by_loop = is_running, set_by_loop
        self.block_order = block_order
        self.optimizers, self.keeper, self.parameters = tuple(optimizers), keeper, parameters
        self.engine: ActivationOffload | None = None
        self.executor: BlockExecutor | None = None
        self.kernels: PatchedKernels | None = None
        self.effects = Effects([])
        """To be checked after each optimizer step."""
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Applies every action, or none."""
        try:
            if not any(isinstance(action, ParameterPlacement) for action in self.plan.actions):
                self.parameters.bring_back()
            if not any(
                isinstance(action, OptimizerPlacement | StepOnCpu | LowBitState) for action in self.plan.actions
            ):
                self.keeper.bring_back()
            done: set[Callable[..., Any]] = set()
            # The heap is given what all else leaves, as it is then.
            for action in sorted(self.plan.actions, key=lambda action: isinstance(action, AllocatorReuse)):
                handler = HANDLERS[type(action)]
                if type(action) not in self.set_by_loop and handler not in done:  # block actions are applied together
                    done.add(handler)
                    handler(self, action)
            self.effects = effects_of(self)
            self._undo.append(self.effects.close)
        except BaseException:
            self.undo()
            raise

    def undo(self, *, keeps_state: bool = False) -> None:
        """Takes everything back, last first, whatever of it fails.

        Args:
            keeps_state: leave the optimizer's state and the parameters where they are, for the plan that follows.
        """
        failure: MemwallError | None = None
        if keeps_state:
            kept = (self.keeper.bring_back, self.parameters.bring_back)
            self._undo = [undo for undo in self._undo if undo not in kept]
        while self._undo:
            try:
                self._undo.pop()()
            except MemwallError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says that an optimizer steps the model, before its first step; what waited for that is applied.

        Raises:
            MemwallError: an action cannot be applied to this optimizer, or not to several.
        """
        if optimizer in self.optimizers:
            return
        self.optimizers += (optimizer,)
        for action in self.plan.actions:
            if isinstance(action, OptimizerPlacement | StepOnCpu | LowBitState):
                self._place_state(action)

    def begin_step(self) -> None:
        """To be called before each step's first forward."""
        self.allocator.hold_limit()
        if self.executor is not None:
            self.executor.begin_step()

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of saved tensors moved to the next tier, and back, so far."""
        return (0, 0) if self.engine is None else (self.engine.bytes_written, self.engine.bytes_read)

    @property
    def not_recomputed(self) -> dict[str, str]:
        """Blocks that gave other results when they ran again, and are not recomputed any more; with the reason."""
        return {} if self.executor is None else self.executor.not_recomputed()

    # -- handlers --------------------------------------------------------------------------------------------------

    def _apply_blocks(self, _: Action) -> None:
        actions = self.plan.actions
        offload = [a for a in actions if isinstance(a, Offload)]
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        for packed in (a for a in offload if a.form != "exact"):
            check_can_pack(device, packed.block)
        if offload:
            self.engine, close = open_engine(
                [self.model],
                disk=self.disk,
                capacity_bytes=self._left_bytes("disk", self.disk_capacity_bytes),
                host_limit_bytes=self._left_bytes("host", self.host_limit_bytes),
                window_bytes=offload[0].window_bytes,
                min_bytes=offload[0].min_bytes,
                owns_pages=self.allocator.owns_pages,
            )
            self._undo.append(close)
        executor = BlockExecutor(
            resolve_blocks([self.model], root_names([self.model])),
            self.block_order,
            engine=self.engine,
        )
        executor.apply(actions)
        self.executor = executor
        self._undo.append(executor.undo)

    def _apply_allocator(self, action: Action) -> None:
        assert isinstance(action, AllocatorReuse)
        if action.cuda_setting:
            require_cuda_setting(action.cuda_setting)
        else:
            self.allocator.apply(action.policy, action.limit_bytes, action.outside_bytes)
            self._undo.append(self.allocator.undo)

    def _apply_accumulate(self, action: Action) -> None:
        assert isinstance(action, Accumulate)
        if not self.is_cooperative:
            raise ApplyError(
                f"the plan runs micro-batches of {action.micro_batch} samples, {action.num_micro_batches} per step, "
                "but this loop does not take them from memwall; set the batch size and accumulation yourself, or "
                "write `for micro in session.step(batch)`"
            )
        self.micro.micro_batch = action.micro_batch

        def undo() -> None:
            self.micro.micro_batch = None

        self._undo.append(undo)

    def _apply_autocast(self, action: Action) -> None:
        assert isinstance(action, Autocast)
        self._undo.append(LowerPrecision(self.model, action.dtype, is_running=self.is_running).undo)

    def _apply_kernels(self, action: Action) -> None:
        assert isinstance(action, FusedKernels)
        self.kernels = apply_kernels(self.model, action.modules, action.chunk_rows)
        self._undo.append(self.kernels.undo)

    def _apply_optimizer_placement(self, action: Action) -> None:
        assert isinstance(action, OptimizerPlacement)
        if self.optimizers:
            self._place_state(action)

    def _apply_cpu_step(self, action: Action) -> None:
        assert isinstance(action, StepOnCpu)
        if self.optimizers:
            self._place_state(action)

    def _apply_low_bit_state(self, action: Action) -> None:
        assert isinstance(action, LowBitState)
        if self.optimizers:
            self._place_state(action)

    def _place_state(self, action: OptimizerPlacement | StepOnCpu | LowBitState) -> None:
        if len(self.optimizers) > 1:
            raise ApplyError(
                f"the plan keeps the optimizer's state {_kept(action)}, and this model is "
                f"stepped by several ({joint_name(self.optimizers)}), whose state stays in memory; make a plan from a "
                "trace of this training, or give a budget in place of a plan"
            )
        self._undo.append(self.keeper.bring_back)
        if isinstance(action, OptimizerPlacement):
            self.keeper.place(self.optimizers[0], action, host_limit_bytes=self.host_limit_bytes or 0)
        elif isinstance(action, StepOnCpu):
            self.keeper.step_on_cpu(self.optimizers[0], action, host_limit_bytes=self.host_limit_bytes or 0)
        else:
            self.keeper.close_moments(self.optimizers[0])

    def _apply_parameter_placement(self, action: Action) -> None:
        assert isinstance(action, ParameterPlacement)
        if not any(isinstance(other, OptimizerPlacement) for other in self.plan.actions):
            raise ApplyError(
                "the plan keeps parameters on disk and the optimizer's state in memory; a step has a few parameters "
                "in memory only where their state comes from disk too: make the plan again with `memwall plan`"
            )
        self._undo.append(self.parameters.bring_back)
        self.parameters.place(self.model, action)

    def _left_bytes(self, tier: Literal["disk", "host"], capacity_bytes: int | None) -> int | None:
        """What saved tensors may use of a tier: without the part that the plan means for state and parameters."""
        if capacity_bytes is None:
            return None
        placements = (
            a for a in self.plan.actions if isinstance(a, OptimizerPlacement | StepOnCpu | ParameterPlacement)
        )
        return capacity_bytes - sum(a.saved_bytes or 0 for a in placements if getattr(a, "tier", "host") == tier)


def _kept(action: OptimizerPlacement | StepOnCpu | LowBitState) -> str:
    if isinstance(action, LowBitState):
        return "in 8 bits"
    return "on disk" if getattr(action, "tier", "host") == "disk" else "in host memory"


HANDLERS: dict[type, Callable[[AppliedPlan, Action], None]] = {
    Recompute: AppliedPlan._apply_blocks,
    Rebuild: AppliedPlan._apply_blocks,
    Offload: AppliedPlan._apply_blocks,
    AllocatorReuse: AppliedPlan._apply_allocator,
    Accumulate: AppliedPlan._apply_accumulate,
    Autocast: AppliedPlan._apply_autocast,
    FusedKernels: AppliedPlan._apply_kernels,
    OptimizerPlacement: AppliedPlan._apply_optimizer_placement,
    StepOnCpu: AppliedPlan._apply_cpu_step,
    LowBitState: AppliedPlan._apply_low_bit_state,
    ParameterPlacement: AppliedPlan._apply_parameter_placement,
}
