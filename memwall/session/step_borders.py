"""Finds where training steps begin and end in a loop that says nothing of them: hooks on its model and optimizers.

A step begins at the first forward after another step, and is over when an optimizer has stepped. Where several step one
model, what steps after the first of them, before the next forward, belongs to the same step. Of several models that
are trained together `turns` says when each has had its turn. A loop without an optimizer changes parameters itself:
the recording of a step sees that, and later steps have as many forwards as that one had.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.apply.memory.exhaustion import Phase
from memwall.errors import ApplyError
from memwall.patches import Patches
from memwall.session.loop.longer_batch import Shape, batch_shapes, input_shape
from memwall.session.loop.step_listener import StepListener
from memwall.session.loop.turns import Turns
from memwall.session.unseen_steps import why_unseen
from memwall.torch_internals.autograd import current_node, execution_is_transformed
from memwall.trace.attached import attach_hook, wrap_forward
from memwall.trace.optimizers import trains
from memwall.trace.together import models_of

Within = Literal["", "beginning", "trial", "evaluation"]
"""What a schedule of a pipeline is doing: it begins a step, tries its stages out, in passes that belong to no step, or
evaluates, whatever gradients that takes; "" of all else."""
_MOST_DRY_RUNS = 3
"""Those that are told apart from steps: a loop may call its model many times without gradients in mind."""

_log = logging.getLogger(__name__)


class StepBorders:
    """Follows one model, or those that are trained together, and optimizers, which may show themselves later."""

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self._patches = Patches("finds where training steps begin and end")
        self.model: nn.Module | None = None
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._hooked = weakref.WeakSet[torch.optim.Optimizer]()
        self.stepped: list[weakref.ref[torch.optim.Optimizer]] = []
        """Refers to optimizers that have stepped so far, in the order of their first steps; some may be gone."""
        self.phase: Phase = "between steps"
        """The part that runs now, or ran last: an evaluation, say, lasts until the next step or saving begins. In a
        step whose optimizers have not stepped it is "forward": a backward tells nobody that it begins."""
        self.run_forward: Callable[..., Any] | None = None
        """Runs any forward of the models that are attached from now on, of a model and by what is called with that."""
        self.in_step = False
        """Tells whether a step has begun in which something that was called has not been stepped yet."""
        self.goes_on = False
        """Tells whether a further optimizer's step would belong to the step that one has ended."""
        self.is_changed_by_hand: Callable[[], bool] = lambda: False
        """Tells, while a step is recorded, whether the loop itself has changed parameters after a backward."""
        self.is_dry_run: Callable[[], bool] = lambda: False
        """Tells, while a step is recorded, whether it has forwards alone, of which nothing is left."""
        self.begins_anew: Callable[[], bool] = lambda: False
        """Tells whether the step is to be recorded from the further forward on that is about to be called."""
        self.num_left_out = 0
        """Forwards that the step had before it was begun anew."""
        self._num_dry_runs = 0
        self.called: nn.Module | None = None
        """The model that was called last with gradients on."""
        self.input_shape: Shape = ()
        """That of the forward that is about to be called, or was called last."""
        self._called_with: tuple[Any, Any] = (), {}
        """The arguments of the forward that is about to be called, while the hook before it runs."""
        self.turns = Turns(())
        """Those of the models in the step that has begun, or began last."""
        self._has_stepped = False
        self._num_forwards = self._forwards_by_hand = 0
        self._is_watching = self._is_watching_scaling = False
        self._is_left_out = False
        """Whether loss scaling has left out an optimizer's step since the present step began."""
        self.is_transformed = self.is_unseen = False
        """Whether torch.func has computed gradients, and whether it does so in each step: under the hooks of a
        recording it raises."""
        self.num_optimizer_steps: int | None = 0
        """Those of the model's optimizers so far; None where there seems to be none."""
        self.trains_copies = False
        """Whether the model is called with other tensors in place of its parameters, which optimizers train."""
        self._transformed_after: int | None = -1
        """The number of those after which torch.func has computed gradients last."""
        self.in_first_forward = False
        """Tells whether the model's forward is about to be called, from within the hook before it."""
        self.in_optimizer = False
        """Tells whether an optimizer steps, from a closure in which a step of training may begin."""
        self.within: Within = ""

    @contextmanager
    def while_within(self, part: Within) -> Iterator[None]:
        """Says what a schedule of a pipeline does meanwhile."""
        before, self.within = self.within, part
        try:
            yield
        finally:
            self.within = before

    @property
    def is_ahead(self) -> bool:
        """Tells whether a step begins, or has begun just now, before any forward of it."""
        return self.within == "beginning"

    @property
    def trains(self) -> bool:
        """Tells whether a forward that is called now is one of training."""
        return torch.is_grad_enabled() and self.within not in ("trial", "evaluation")

    @property
    def batch_shapes(self) -> tuple[Shape, ...]:
        """Returns the shapes of all tensors that a model is about to be called with, where these are known."""
        return batch_shapes(*self._called_with)

    @property
    def attached_model(self) -> nn.Module:
        """Returns the model, which is known."""
        assert self.model is not None
        return self.model

    def attach(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Begins to follow a model, and its optimizers as far as they are known."""
        self.model, self.turns = model, Turns(models_of(model))
        before = self._before_forward
        for each in models_of(model):
            self._patches.push(attach_hook(each.register_forward_pre_hook, before, with_kwargs=True, prepend=True))
            self._patches.push(attach_hook(each.register_state_dict_pre_hook, self._before_saving))
            if self.run_forward is not None:
                with suppress(ApplyError):  # of a scripted one
                    unwrap = wrap_forward(each, partial(self.run_forward, each), type(each).__name__)
                    self._patches.add("forward", type(each).__name__, unwrap, owner=each)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)

    def attach_instead(self, model: nn.Module) -> None:
        """Follows other models from now on, in the step that has begun as well, and the same optimizers."""
        optimizers, self.optimizers = self.optimizers, ()
        self.detach()
        turns = self.turns
        self.attach(model, [optimizer for optimizer in optimizers if trains(optimizer, model)])
        self.turns.take_over(turns)
        if self.stepped and not {one() for one in self.stepped} & set(self.optimizers):
            self.stepped.clear()  # those of models that are gone

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to follow an optimizer."""
        self.optimizers += (optimizer,)
        if optimizer in self._hooked:
            return
        self._hooked.add(optimizer)
        self._patches.hook(optimizer.register_step_pre_hook, self._enter_optimizer)
        self._patches.hook(optimizer.register_step_post_hook, self._after_optimizer)
        self._patches.hook(optimizer.register_state_dict_pre_hook, self._before_saving)

    def replace_optimizers(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets the others: this one steps in their place. The step is another one where it is of another class."""
        classes = [type(one) for one in self.optimizers if one is not optimizer]
        self.optimizers = (optimizer,)
        if classes == [type(optimizer)]:
            self.stepped = [weakref.ref(optimizer)]

    def let_go_optimizers(self, *, in_cycles: bool = False) -> None:
        """Forgets those that nobody else holds, as of a stage of the script that is over: their state goes with them.

        To be called when no plan in effect does anything to them, and either no step goes on or another one steps.

        Args:
            in_cycles: whether what has taken their steps over holds them, and they hold it.
        """
        known = [*map(weakref.ref, self.optimizers)]
        self.optimizers = ()
        if in_cycles:
            gc.collect()
        self.optimizers = tuple(optimizer for one in known if (optimizer := one()) is not None)
        self.stepped = [one for one in self.stepped if one() is not None]

    def watch_optimizers(self) -> None:
        """Has the listener told before an optimizer steps, after every other hook of it, and of numpy's arrays."""
        if not self._is_watching:
            self._is_watching = True
            self._patches.hook(register_optimizer_step_pre_hook, self._before_optimizer)
            self._patches.wrap(Tensor, "numpy", _weakly(self._around_numpy))

    def detach(self) -> None:
        """Takes all hooks away."""
        self._patches.undo()
        self._hooked.clear()
        self._is_watching = self._is_watching_scaling = False

    def let_go(self) -> None:
        """Takes all hooks away and forgets the optimizers: whoever keeps a session that has ended keeps no state."""
        self.detach()
        self.optimizers = ()
        self.stepped.clear()

    def begin_part(self) -> None:
        """Says that a part of a step begins: what fails from here on fails in a forward, or in its backward."""
        self.phase = "forward"

    def drop_step(self) -> None:
        """Forgets the step that has begun: the next forward begins it again."""
        self.in_step = self.in_optimizer = self._has_stepped = False

    def drop_dry_run(self) -> bool:
        """Forgets what was called before the training, as where a model makes its parameters once it sees a batch.

        Returns:
            Whether there was such a call. Whoever listens hears of a step that is over.
        """
        is_dropped = self.in_step and self._num_dry_runs < _MOST_DRY_RUNS and self.is_dry_run()
        if is_dropped:
            self._num_dry_runs += 1
            self.drop_step()
            self._listener.step_skipped()
        return is_dropped

    def end_step(self) -> None:
        """Says that every optimizer has stepped: no further one belongs to the step that one has ended."""
        self.goes_on = False

    def end_run(self) -> None:
        """Says that nothing follows: a step in which something has stepped is over."""
        self._end_by_hand()
        if self._has_stepped:
            self.in_step = False

    def await_all(self) -> None:
        """Has the steps that follow wait for every model that the last one has stepped."""
        self.turns.await_all()

    def begins_step(self, model: nn.Module) -> bool:
        """Tells whether a forward with gradients on begins another step than the one that has begun or ended."""
        if not self._has_stepped:
            return not self.in_step or self._is_over_by_hand
        return not self.in_step and not (self.goes_on and self.turns.goes_on_with(model))

    def enter_forward(self, model: nn.Module | None = None) -> None:
        """Does what the hook before each forward does; to be called where that hook came too late for one."""
        model = self.attached_model if model is None else model
        self._listener.before_forward()
        if execution_is_transformed() or self.trains_copies:
            self._transformed_after = self.num_optimizer_steps
            if not self.is_transformed:
                self.is_transformed = True
                _log.warning("%s to have them planned", "; ".join(why_unseen(trains_copies=self.trains_copies)))
            return
        if self.is_unseen or (self.called is None and self._transformed_after == self.num_optimizer_steps):
            return  # of a step whose gradients torch.func computes too, and may go on to
        if self.in_step:
            self.drop_dry_run()
        trains = self.trains
        is_another = trains and self.begins_step(model)
        if self.in_step:
            self._end_by_hand()
        if not trains:
            if not self.in_step:
                self.goes_on, self.phase = False, "evaluation"
                self._listener.evaluation_begins()
            return
        if not self._is_watching_scaling:
            self._watch_scaling()
        self.phase, self.called = "forward", model
        num_before = 0 if is_another else self._num_forwards
        if not is_another and (self._has_stepped or self.in_optimizer or not self.begins_anew()):
            # A further micro-batch of the same step, or another model's turn.
            self._num_forwards += 1
            self.turns.called(model)
            self.in_step = True
            return
        self.goes_on = False
        self.in_first_forward = not self.is_ahead
        try:
            self._listener.step_begins()
        finally:
            self.in_first_forward = self.in_optimizer = False
        self.turns.begin(model)
        self.in_step, self._has_stepped, self._num_forwards = True, False, int(not self.is_ahead)
        self._is_left_out, self.num_left_out = False, num_before

    @property
    def is_first_forward(self) -> bool:
        """Tells whether a step has begun with the forward that is called, or was called last."""
        return self.in_step and not self._has_stepped and self._num_forwards == 1

    @property
    def had_one_forward(self) -> bool:
        """Tells, while a step begins, whether the one before had a single forward: no micro-batches, no second view."""
        return self._num_forwards == 1

    @property
    def have_all_stepped(self) -> bool:
        """Tells whether each optimizer that is known has stepped in the present step, as far as it has come."""
        return self.turns.num_optimizers == len(self.optimizers)

    @property
    def is_stepped_by_hand(self) -> bool:
        """Tells whether the loop changed parameters itself in the last step, and no optimizer did."""
        return self._forwards_by_hand > 0

    @property
    def _is_over_by_hand(self) -> bool:
        """Tells whether a step is over that no optimizer ends."""
        is_last = 0 < self._forwards_by_hand <= self._num_forwards
        return self.in_step and not self._has_stepped and (is_last or self.is_changed_by_hand())

    def _end_by_hand(self) -> None:
        if self._is_over_by_hand:
            self._forwards_by_hand = self._num_forwards
            self.turns.stepped_by_hand()
            self.in_step, self._has_stepped, self.phase = False, True, "between steps"
            self._listener.optimizer_stepped(is_first=True)

    def _watch_scaling(self) -> None:
        """Hears of steps that loss scaling leaves out, from a class of torch's: hence only while something trains."""
        self._is_watching_scaling = True
        self._patches.wrap(torch.amp.GradScaler, "step", _weakly(self._around_scaled_step))
        self._patches.wrap(torch.amp.GradScaler, "update", _weakly(self._after_scaling))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_node() is None and self.within != "trial":
            self.input_shape = input_shape(args, kwargs)
            self._called_with = args, kwargs
            try:
                self.enter_forward(module)
            finally:
                self._called_with = (), {}  # a batch is its loop's to keep

    def _before_saving(self, *_: Any) -> None:
        if not self.in_step:
            self.phase, self.goes_on = "saving", False
            self._listener.saving_begins()

    def _around_numpy(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.in_step or self.is_stepped_by_hand:
            self._listener.array_begins(tensor)
        return original(tensor, *args, **kwargs)

    def _around_scaled_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Notes that `GradScaler.step` has not called an optimizer, as it does where a gradient is not finite."""
        result = original(scaler, optimizer, *args, **kwargs)
        if self.in_step and not self._has_stepped and trains(optimizer, self.attached_model):
            self._is_left_out = True
        return result

    def _after_scaling(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Ends a step whose optimizers were all left out; another model's scaler ends nothing of this one."""
        original(*args, **kwargs)
        is_left_out, self._is_left_out = self._is_left_out, False
        if is_left_out and self.in_step and not self.in_optimizer and not self._has_stepped:
            self.in_step, self.goes_on, self.phase = False, False, "between steps"
            self._listener.step_skipped()

    def _enter_optimizer(self, *_: Any) -> None:
        self.in_optimizer = True
        if self.in_step or self.goes_on:
            self.phase = "optimizer step"

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self.optimizers:
            self._listener.optimizer_begins(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.in_optimizer = False
        self.num_optimizer_steps = (self.num_optimizer_steps or 0) + 1
        if weakref.ref(optimizer) not in self.stepped:
            self.stepped.append(weakref.ref(optimizer))
        if self.in_step or self.goes_on:
            self.turns.stepped(optimizer)
            is_first, self._has_stepped, self._forwards_by_hand = not self._has_stepped, True, 0
            self.in_step, self.goes_on, self.phase = not self.turns.are_over, True, "between steps"
            self._listener.optimizer_stepped(is_first=is_first)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what calls a method for a change of a class, which does not keep alive whom nobody closes."""
    found = weakref.WeakMethod(method)

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = found()
        return original(*args, **kwargs) if bound is None else bound(original, *args, **kwargs)

    return run
