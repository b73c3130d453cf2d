"""Compiled graphs: a ratio that torch's partitioner is told when it cuts a graph in forward and backward."""

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

from memwall.apply.effect import Effect
from memwall.apply.technique import Handler, InRecording, Target, register
from memwall.errors import ApplyError
from memwall.machine.meter import meter_of
from memwall.machine.process_group import num_processes
from memwall.planning.menu import WINDOW_BYTES
from memwall.planning.settings import Settings
from memwall.planning.techniques.compiled_graphs import CompiledGraphs
from memwall.predict.curve import live_peak_bytes
from memwall.torch_internals.compiler import is_compiled, num_compiled
from memwall.torch_internals.partitioner import SavedBytes, budget_ratio, cut_by, start_over
from memwall.trace.records import Trace
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_SHARE = 0.5
"""Part of the room that graphs may save: backward computes in the rest, and the compiler grows in it, too."""
_cuts: "WeakKeyDictionary[nn.Module, GraphCuts]" = WeakKeyDictionary()
"""How graphs of a model were cut: code that was compiled in an earlier recording is not compiled again in this one."""
_RATIOS = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Less than the last has the whole forward of a graph run again before its backward, all of which is in memory then."""


@register("compiled-graphs")
class CompiledGraphsHandler(Handler[CompiledGraphs]):
    """Tells the partitioner the plan's ratio, for what is compiled from then on."""

    @classmethod
    def begin_recording(cls, model: nn.Module, settings: Settings, *, is_streamed: bool) -> InRecording | None:
        """Has graphs of the step that is recorded save what there is room for: it has to fit as those after it."""
        if not any(map(is_compiled, model.modules())):
            return None
        if num_processes() > 1:
            _log.warning("graphs are allowed, but left alone: each of several ranks would cut its own otherwise")
            return None
        meter = meter_of(model)

        def room_bytes() -> int:
            coming_bytes = sum(
                p.numel() * p.element_size() for p in model.parameters() if p.requires_grad and p.grad is None
            )
            return int(_SHARE * (settings.budget_bytes - meter.now_bytes() - coming_bytes - WINDOW_BYTES))

        return _recorded(model, GraphCuts(room_bytes, _cuts.get(model)))

    @classmethod
    def record_again(cls, model: nn.Module, trace: Trace, *, is_running: bool) -> InRecording | None:
        """Has everything compiled once more, cut elsewhere: a step has shown that its backward needs more room."""
        cuts = _cuts.get(model)
        if cuts is None or not cuts.recut(live_peak_bytes(trace.steps[0], trace.device)):
            return None
        _log.info("no plan fits; the next step compiles again, to save at most %.0f%%", 100 * cuts.most)
        start_over()
        return _recorded(model, cuts)

    def apply(self, target: Target) -> None:
        undo = budget_ratio(self.action.ratio)
        if undo is None:
            raise ApplyError(
                f"the plan has compiled graphs save {self.action.ratio:.0%}, and nothing here is compiled yet, or this "
                "torch has no activation_memory_budget; compile the model before the run begins"
            )
        target.on_undo(undo)

    def effect(self, target: Target) -> "CompiledGraphsEffect":
        return CompiledGraphsEffect(self.action, _cuts.get(target.model))


class GraphCuts:
    """Cuts each graph at the largest ratio at which all of them together have room; at the least where none has.

    What a backward needs besides what is saved is not known before it runs, and a deeper cut may need more: `recut`
    goes by the peaks of steps that ran.

    Args:
        room_bytes: returns what graphs may save.
        before: how graphs were cut that are compiled already, and are not compiled again.

    Attributes:
        ratio: the smallest ratio of a graph so far; the script's own until there was one.
        left_out_bytes: what graphs would save beside what they do.
        most: the largest ratio that is taken.
    """

    def __init__(self, room_bytes: Callable[[], int], before: "GraphCuts | None" = None) -> None:
        self._room_bytes = room_bytes
        self.ratio: float = 1.0 if before is None else before.ratio
        self.left_out_bytes: int = 0 if before is None else before.left_out_bytes
        self.most, self._saved_bytes = 1.0, 0
        self._is_told = False
        """Whether graphs save `most`, whatever room there seems to be."""
        self._own = 0.0
        """The script's own ratio, the most that graphs are to save."""
        self._peaks: dict[float, int] = {}
        self._undo = cut_by(self._choose)

    @property
    def is_possible(self) -> bool:
        """Returns whether this torch's partitioner can be told."""
        return self._undo is not None

    def recut(self, peak_bytes: int) -> bool:
        """Has graphs that are compiled from now on cut otherwise than any was; returns whether that is possible.

        Cuts go deeper while that lowers the peak, and then as far up from the first one.

        Args:
            peak_bytes: the most bytes that were live in a step with the present cut.
        """
        is_higher = bool(self._peaks) and peak_bytes >= min(self._peaks.values())
        is_going_up = bool(self._peaks) and self.ratio > max(self._peaks)
        self._peaks[self.ratio] = peak_bytes
        deeper = [ratio for ratio in _RATIOS if ratio < min(self._peaks)]
        shallower = [ratio for ratio in reversed(_RATIOS) if max(self._peaks) < ratio <= self._own]
        if deeper and not is_higher and not is_going_up:
            self.most = deeper[0]
        elif shallower and not (is_higher and is_going_up):
            self.most, self._is_told = shallower[0], True
        else:
            return False
        self.ratio, self._saved_bytes, self.left_out_bytes = 1.0, 0, 0
        return True

    def undo(self) -> None:
        """Leaves the compiler to itself. Safe to call twice."""
        self._room_bytes = lambda: 0  # it knows the model, which this does not keep alive
        if self._undo is not None:
            self._undo()

    def _choose(self, saved_bytes: SavedBytes, own: float) -> float:
        self._own, most = own, min(own, self.most)
        whole_bytes, room_bytes = saved_bytes(own), self._room_bytes()
        for ratio in (most, *(ratio for ratio in _RATIOS if ratio < most)):
            num_bytes = whole_bytes if ratio == own else saved_bytes(ratio)
            if self._is_told or num_bytes <= room_bytes - self._saved_bytes:
                break
        _log.info(
            "a compiled graph saves %s of %s, of %s that there is for all",
            *map(format_bytes, (num_bytes, whole_bytes)),
            format_bytes(max(0, room_bytes)),
        )
        self._saved_bytes += num_bytes
        self.left_out_bytes += whole_bytes - num_bytes
        self.ratio = min(self.ratio, ratio)
        return ratio


class CompiledGraphsEffect(Effect):
    """Sees that graphs were compiled with the plan's ratio: in the recorded step, or since the plan was applied."""

    def __init__(self, action: CompiledGraphs, cuts: GraphCuts | None) -> None:
        self.name = f"compiled graphs that save {action.ratio:.0%}"
        self.expected = "graphs are compiled that save no more"
        self._is_cut = cuts is not None and cuts.ratio <= action.ratio
        self._num_before = num_compiled()

    def is_seen(self) -> bool:
        return self._is_cut or num_compiled() > self._num_before

    def contrary(self) -> str:
        if self.is_seen():
            return ""
        return "nothing has been compiled since: the model was called before the run, or is not compiled"


def _recorded(model: nn.Module, cuts: GraphCuts) -> InRecording | None:
    if not cuts.is_possible:
        _log.warning("graphs are allowed, but left alone: this torch's partitioner has other parts")
        return None
    _cuts[model] = cuts

    def settled(settings: Settings, trace: Trace) -> Settings:
        if cuts.ratio == 1.0:
            return settings.with_standing(CompiledGraphs, None)
        action = CompiledGraphs(ratio=cuts.ratio, saved_bytes=cuts.left_out_bytes)
        return settings.with_standing(CompiledGraphs, action)

    return InRecording(cuts.undo, settled)
