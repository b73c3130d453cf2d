"""Records one training step while it runs: the first stage of trace -> predict -> plan -> apply.

A dispatch mode sees every operation below autograd, weak references to storages see every death, saved-tensor hooks
see what backward keeps, and module hooks say whose forward is running.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memwall.errors import TraceError
from memwall.machine.memory_speed import kernel_seconds
from memwall.patches import Patches
from memwall.torch_internals.autograd import (
    current_node,
    next_sequence_number,
    sequence_number_of,
)
from memwall.torch_internals.compiler import calls_as_one, inside_compiled, is_compiled, is_region
from memwall.torch_internals.dispatch import StepMode, leave_mode
from memwall.torch_internals.operators import num_flops
from memwall.torch_internals.sharding import is_sharding_unit, local_part
from memwall.trace.attached import attach_hook
from memwall.trace.device_timer import DeviceTimer
from memwall.trace.event_log import EventLog
from memwall.trace.gathered import Gathered
from memwall.trace.gradients.gradient_watch import GradientWatch
from memwall.trace.left_out.python_numbers import python_numbers
from memwall.trace.modules import ModuleTable, as_moved
from memwall.trace.op_work import OpWork, own_work_of, work_of
from memwall.trace.operator_arguments import batch_shape, numbers_among, tensors_among, written_among
from memwall.trace.optimizers import Optimizers, optimizers_of
from memwall.trace.records import GradientUse, Phase
from memwall.trace.recurrent import plain_layers
from memwall.trace.saved_tensors import Parking, SavedTensors
from memwall.trace.source_lines import SourceLines, StepLines
from memwall.trace.together import models_of
from memwall.trace.workspaces import Workspaces


def _state_of(optimizers: Optimizers) -> list[Tensor]:
    found: list[Tensor] = []
    for optimizer in optimizers_of(optimizers):
        tensors_among(optimizer.state.values(), found)
    return found


class StepRecorder(StepMode):
    """Records from `start()` to `finish()`; between them at least one forward, backward and optimizer step run.

    Args:
        roots: the modules the step trains, in order of their first call.
        parking: where saved tensors go while recording; None keeps them, as a plain step does.
        workspaces: what operators were seen to allocate for themselves, to be shared between steps.
        seconds_of: what an operation takes, where nothing is computed; None measures it.
        lines: the user's lines met so far, to be shared between steps.
        begins_step: tells whether a call of a root, with gradients on, is the next step's; by default that is so once
            an optimizer has stepped.
        find_optimizers: returns what is going to step the roots; asked where `start` is told none.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        parking: Parking | None = None,
        workspaces: Workspaces | None = None,
        seconds_of: Callable[[OpWork], float] | None = None,
        lines: SourceLines | None = None,
        begins_step: Callable[[nn.Module], bool] | None = None,
        find_optimizers: Callable[[], Optimizers] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seconds_of = seconds_of
        self.workspaces = workspaces or Workspaces()
        self.table = ModuleTable(roots)
        self.log = EventLog()
        self._lines = StepLines(lines or SourceLines())
        self._phase: Phase = "other"
        self._in_optimizer = False
        self.num_optimizer_steps = 0
        self.input_shapes: tuple[tuple[int, ...], ...] = ()
        """Those of all tensors that a root was called with first."""
        self._is_written_by_hand = False
        """Whether a parameter was written after a backward, outside of any optimizer."""
        self.draws_in_python = False
        """Whether a root's forward took random numbers of Python's, or of numpy's."""
        self._numbers: Hashable = None
        self._begins_step = begins_step or (lambda _: self.num_optimizer_steps > 0)
        self._find_optimizers = find_optimizers or (lambda: None)
        self._gradients: GradientWatch | None = None
        self.gradient_use: GradientUse | None = None
        """Says what became of gradients, once the recording has ended well."""
        self._patches = Patches("records a step")
        self._root_ids = {id(model) for root in roots for model in models_of(root)}
        self._gathered = Gathered(roots)
        self._saved = SavedTensors(self.log, parking, self._gathered)
        places = (parameter.device for root in roots for parameter in root.parameters())
        self._device = device = next((place for place in places if place.type == "cuda"), None)
        self._device_timer = DeviceTimer(device) if device is not None and seconds_of is None else None
        self._units: set[int] = set()

    def start(self, optimizers: Optimizers = None, running_root: nn.Module | None = None) -> None:
        """Begins recording. Parameters, buffers, gradients and optimizer state count as there before the step.

        Args:
            running_root: a root that is being called right now, from a hook of its own before its forward.
        """
        for root in self.table.roots:
            for module in as_moved(root):
                for parameter in nn.Module.parameters(module, recurse=False):
                    self.log.existing(local_part(parameter), "parameter")
                    if parameter.grad is not None:
                        self.log.existing(local_part(parameter.grad), "gradient")
                for buffer in nn.Module.buffers(module, recurse=False):
                    self.log.existing(local_part(buffer), "buffer")
            for _, weights in plain_layers(root):
                self.log.put_together([local_part(weight) for weight in weights])
        for tensor in _state_of(optimizers):
            self.log.existing(tensor, "optimizer_state")
        self._gradients = GradientWatch(self.table.roots, self.log, lambda: optimizers or self._find_optimizers())
        self._gradients.begin()
        self._patches.add("hook", "gradients of parameters", self._gradients.end)
        self._follow_modules()
        self._patches.enter("setting", "torch.compile", calls_as_one())
        self._patches.hook(register_optimizer_step_pre_hook, self._enter_optimizer)
        self._patches.hook(register_optimizer_step_post_hook, self._leave_optimizer)
        for unit in (module for root in self.table.roots for module in root.modules() if is_sharding_unit(module)):
            if unit is not running_root:
                # After fully_shard's own hook, which gathers: a plan counts operations within the forward.
                self._units.add(id(unit))
                self._patches.push(attach_hook(unit.register_forward_pre_hook, self._enter))
        self._thread = threading.get_ident()
        self._saved.begin()
        self.__enter__()  # type: ignore[no-untyped-call]
        if running_root is not None:
            begins_step, self._begins_step = self._begins_step, lambda _: False
            self._enter_module(running_root, ())
            self._begins_step = begins_step

    def stop(self) -> None:
        """Ends recording and takes every hook away; safe to call twice.

        What torch keeps for each thread can be taken away in the thread that began alone. From another one, as of a
        script that trains in threads, it is left there, records nothing any more, and ends with its thread.
        """
        if not self._saved.is_on:
            return
        is_here = threading.get_ident() == self._thread
        try:
            try:
                self._saved.end(is_here=is_here)
            finally:
                if is_here:
                    leave_mode(self)
        finally:
            self._patches.undo()

    def finish(self, optimizers: Optimizers) -> EventLog:
        """Ends recording and settles what only the end of the step can tell: gradients, state, device times."""
        self.stop()
        timer, self._device_timer = self._device_timer, None
        if timer is not None:
            for index, seconds in timer.settle(self.log.work_of).items():
                self.log.ops[index].seconds = seconds
            self.log.launch_seconds = timer.launch_seconds
        for root in self.table.roots:
            for parameter in root.parameters():
                if parameter.grad is not None:
                    self.log.categorise(local_part(parameter.grad), "gradient")
        for tensor in _state_of(optimizers):
            self.log.categorise(tensor, "optimizer_state")
        if not self.log.ops:
            raise TraceError("the recorded step ran no tensor operation; nothing can be planned from it")
        if not self._gathered.gather_the_next:
            self.log.forget_units()  # what else they would do is not known
        gradients, self._gradients = self._gradients, None
        self.gradient_use = None if gradients is None else gradients.settled()
        return self.log

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Leaves out what runs meanwhile: what autograd saves is parked, and told to nobody."""
        self._saved.num_paused += 1
        try:
            yield
        finally:
            self._saved.num_paused -= 1

    @property
    def is_changed_by_hand(self) -> bool:
        """Returns whether parameters were written after a backward, outside of any optimizer, or got other tensors."""
        return self._is_written_by_hand or (self.log.has_mark("backward") and self._have_other_tensors())

    def _have_other_tensors(self) -> bool:
        """Tells whether a parameter has a tensor that the step has made, by `parameter.data = ...`."""
        trained = (each for root in self.table.roots for each in root.parameters() if each.requires_grad)
        return any(self.log.is_born(each) for each in trained)

    @property
    def is_dry_run(self) -> bool:
        """Returns whether all that has run was called for nothing: what it returned is gone, without a backward.

        A call that is about to run may be entered already.
        """
        is_begun = len(self.log.call_stack) > 1 or self.num_optimizer_steps > 0 or self.log.has_mark("backward")
        return not is_begun and self.log.is_dropped

    @property
    def place(self) -> str:
        """Returns what runs now, for messages: "forward of blocks.3 (Block)", "optimizer"."""
        log, phase = self.log, self._phase
        node = current_node()
        call = log.call_stack[-1] if log.call_stack else -1
        if node is not None:
            phase, call = "backward", log.call_of_node(sequence_number_of(node))
        if call < 0:
            return phase
        module = self.table.records[log.calls[call].module]
        return f"{phase} of {module.path} ({module.class_name})" if module.path else f"{phase} of {module.class_name}"

    def _follow_modules(self) -> None:
        """Hooks calls of modules: of all by torch's own hooks, or one by one where the compiler would trace those."""
        leave, options = self._leave_module, {"with_kwargs": True, "always_call": True}
        called = [module for root in self.table.roots for module in root.modules()]
        inside = {id(inner) for root in self.table.roots for inner in inside_compiled(root)}
        if not any(map(is_compiled, called)):
            hooks = torch.nn.modules.module
            self._patches.hook(hooks.register_module_forward_pre_hook, self._enter_module)
            self._patches.hook(hooks.register_module_forward_hook, leave, **options)
            return
        for module in {id(module): module for module in called if id(module) not in inside}.values():
            self._patches.push(attach_hook(module.register_forward_pre_hook, self._enter_module, prepend=True))
            self._patches.push(attach_hook(module.register_forward_hook, leave, **options))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._units:
            self._enter(module, args)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if (
            torch.compiler.is_compiling() or self._saved.num_paused
        ):  # what a function that is compiled makes of this is nothing
            return
        index = self.table.index_of(module)
        if index < 0:
            return
        node = current_node()
        if node is None and id(module) in self._root_ids and not self.log.call_stack:
            if torch.is_grad_enabled() and self._begins_step(module):
                return  # the next step's: whoever records ends this one in a hook that runs after this
            self._set_phase("forward" if torch.is_grad_enabled() else "eval")
            self._note_input(args)
            self._numbers = python_numbers()
        self.log.enter_call(index, next_sequence_number())

    def _note_input(self, values: Iterable[Any]) -> None:
        """Notes the first tensor that the model is called with: it tells the batch; later calls change nothing."""
        found = [tensor for tensor in tensors_among(values, []) if tensor.dim() > 0] if not self.log.micro_batch else []
        if found:
            first, self.input_shapes = found[0], tuple(tuple(tensor.shape) for tensor in found)
            self.log.input_shape = batch_shape(values)
            self.log.micro_batch = self.log.input_shape[0]
            self.log.input_dtype = str(first.dtype).removeprefix("torch.")

    def _leave_module(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or self._saved.num_paused:
            return
        # torch passes (kwargs, output); after an exception in forward only the output, which is None.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        index = self.table.index_of(module)
        if index < 0 or not self.log.call_stack:
            return
        inputs = tensors_among((*args, *kwargs.values()), [])
        outputs = tensors_among((output,), [])
        self.log.leave_call(index, next_sequence_number(), inputs, outputs)
        if not self.log.call_stack and self._phase == "forward":
            self._note_input((*args, *kwargs.values()))
            self._set_phase("loss")
            self.draws_in_python |= python_numbers() != self._numbers

    def _enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._gradients is not None:
            self._gradients.optimizer_begins(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.log.categorise(local_part(parameter.grad), "gradient")
        self._in_optimizer = True
        self._set_phase("optimizer")

    def _leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        self.num_optimizer_steps += 1
        self._set_phase("other")

    def _set_phase(self, phase: Phase) -> None:
        if phase != self._phase:
            # Several forwards may lie before one backward, as of two encoders.
            last = next((name for name, _ in reversed(self.log.marks) if name in ("backward", "accumulation")), "")
            if phase == "forward" and last == "backward":
                self.log.mark("accumulation")
            self._phase = phase
            self.log.mark(phase)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked of fake tensors, more often than all else: they know it
            return args[0].device
        if self._saved.num_paused or not self._saved.is_on:
            return func(*args, **kwargs)
        in_pieces = self.workspaces.in_pieces(func)
        return self._recorded(func, args, kwargs) if in_pieces is None else in_pieces(self._recorded, *args)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator and records it."""
        log = self.log
        if self._device_timer is not None:
            log.begin_on(torch.cuda.current_stream(self._device).cuda_stream)
        for unit, gathered in self._gathered.tensors:
            log.note_size(gathered, self.table.index_of(unit))
        node = current_node()
        sequence = -1
        if node is not None:
            sequence = sequence_number_of(node)
            if self._phase not in ("backward", "optimizer"):
                self._set_phase("backward")
        elif self._phase == "backward" and not self._in_optimizer and not log.call_stack:
            self._set_phase("other")
        inputs = tensors_among(args, [])
        if kwargs:
            tensors_among(kwargs.values(), inputs)
        is_code = is_region(func)
        name = func.__name__ if is_code else str(func)
        index = log.begin_op(name, self._phase, sequence, self._lines.of_op(func, node), inputs)
        whole = args[0] if is_code else func
        kernel = kernel_seconds() if is_code else 0.0
        begin = time.perf_counter()
        with self.workspaces.measuring(whole, inputs, args, kwargs) as workspace:
            log.workspaces(index, workspace.ahead)
            timing: AbstractContextManager[None] = nullcontext()
            if self._device_timer is not None:
                key = (Workspaces.key_of(whole, inputs), numbers_among(args))
                timing = self._device_timer.timing(index, key)
            if is_code:
                inputs.clear()  # the code lets go of what it needs no longer, and so must whoever watches
            with timing:
                out = func(*args, **kwargs)
        seconds = time.perf_counter() - begin
        if is_code:  # what it makes inside becomes resident now, and nobody sees how much: in later steps it is there
            seconds = max(0.0, seconds - (kernel_seconds() - kernel))
        flops = 0 if is_code else num_flops(func, args, kwargs, out)
        outputs = tensors_among((out,), [])
        changed = [] if is_code else written_among(func, args, kwargs)
        if self._seconds_of is not None:
            own = own_work_of(func, args)
            seconds = self._seconds_of(work_of(str(func), flops, inputs, outputs, changed, own=own))
        if node is None and changed and not self._in_optimizer and log.has_mark("backward"):
            self._note_by_hand(changed)
        results = self.workspaces.in_order(func, outputs)
        if workspace.before_last:
            log.born(index, results[:-1])
            log.workspaces(index, workspace.before_last)
        log.end_op(index, seconds, flops, results, changed)
        log.workspaces(index, workspace.beyond(log.born_bytes(index)))
        return out

    def _note_by_hand(self, changed: list[Tensor]) -> None:
        """Notes that parameters change between a backward and the next forward: a loop steps them itself."""
        if any(self.log.category_of(tensor) == "parameter" for tensor in changed):
            self._is_written_by_hand = True
            if self.num_optimizer_steps == 0:
                self._set_phase("optimizer")
