"""Notices that a run needs more memory with each step, and names the lines whose tensors nothing frees.

What the process holds between steps is looked at when a step begins. Once it rises evenly one step's tensors are noted,
and asked for three steps later: those that still live are what grows. What else may run out is looked at beside it.
"""

import logging
import math
import os
import tempfile
from collections.abc import Callable

import torch
from torch import nn

from memwall.machine.meter import mapped_bytes
from memwall.session.watch.births import Births, Living
from memwall.session.watch.device_memory import DeviceMemoryWatch
from memwall.session.watch.disk_space import DiskSpaceWatch
from memwall.session.watch.even_rise import EvenRise, is_used_up_soon
from memwall.session.watch.open_files import OpenFilesWatch
from memwall.torch_internals.compiler import is_compiled
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_LEAST_BYTES = 8 << 20
"""The least that four stretches must have risen by; a heap without growth moves by less."""
_STEPS_LATER = 3
"""Steps after which tensors of a step are asked for: what a loop holds over to the next step is gone by then."""
_LEAST_SHARE = 0.5
"""Part of the growth that the tensors found must account for, to be named as its cause."""
_MOST_LINES = 3


class GrowthWatch:
    """Looks at a run once a step, and says once what grows.

    Args:
        budget_bytes: returns the budget of the run; 0 for none.
        model: returns what is trained. Of one that is compiled no step's tensors are noted.
        disk: returns the folder for what leaves memory; None for the system's own.
    """

    def __init__(
        self, *, budget_bytes: Callable[[], int], model: Callable[[], nn.Module], disk: Callable[[], str | None]
    ) -> None:
        self._budget_bytes, self._model = budget_bytes, model
        self._rise = EvenRise(_LEAST_BYTES)
        self._files = OpenFilesWatch()
        self._disks = DiskSpaceWatch(lambda: (disk() or tempfile.gettempdir(), os.curdir))
        self._device: DeviceMemoryWatch | None = None
        self._num_steps = 0
        self._births: Births | None = None
        self._noted_at = self._anew_at = self._mapped_bytes = 0
        self._watching: tuple[int, ...] | None = None
        self._bytes_per_step = 0.0
        self._is_said = False
        self._is_outside_tensors = False
        """Whether a step's tensors were asked for, and did not account for the growth."""

    def begin_step(self, now_bytes: int, device: torch.device) -> None:
        """Looks at what the steps so far have left; to be called when a step begins.

        Args:
            now_bytes: what was held when the last one had ended.
            device: that the model is on.
        """
        self._num_steps += 1
        self._files.begin_step()
        self._disks.begin_step()
        if device.type == "cuda":
            self._device = self._device or DeviceMemoryWatch(device, self._budget_bytes)
            self._device.begin_step()
        self.close()
        if self._is_said:
            return
        self._rise.add(float(now_bytes))
        if self._births is not None:
            if self._num_steps == self._noted_at + _STEPS_LATER:
                self._ask(now_bytes)
            return
        room_bytes = self._room_bytes(now_bytes) if self._is_outside_tensors else 0
        rise = self._rise.per_step(room_bytes)
        if rise is None:
            return
        self._bytes_per_step = rise
        if self._is_outside_tensors:
            self._say_of_others(now_bytes)
        elif Births.watching() != self._watching or any(map(is_compiled, self._model().modules())):
            self._say(now_bytes, "which lines do that is not known, as the model is compiled or its steps watched")
        else:
            self._births, self._noted_at = Births(self._model()), self._num_steps
            self._note_pages()

    def end_step(self) -> None:
        """Looks at who watches operations between steps, too, where notes may begin; to be called when a step ends.

        Modes have to end in the reverse of the order they began: one that a loop has around its forward alone would
        end the notes instead of itself.
        """
        self._watching = Births.watching() if self._rise.may_rise else None

    def close(self) -> None:
        """Ends what is noted of a step."""
        if self._births is not None:
            self._births.stop()

    def _ask(self, now_bytes: int) -> None:
        assert self._births is not None
        births, self._births = self._births, None
        living = births.living()
        if sum(each.num_bytes for each in living) < _LEAST_SHARE * self._bytes_per_step:
            # What no step's tensors account for moves for more reasons: it has to rise for longer, and from here on,
            # unless there is no time for that.
            self._is_outside_tensors = True
            if is_used_up_soon(self._room_bytes(now_bytes), self._bytes_per_step):
                self._say_of_others(now_bytes)
            else:
                self._begin_anew()
            return
        more = f" and {len(living) - _MOST_LINES} lines more" if len(living) > _MOST_LINES else ""
        self._say(
            now_bytes,
            f"what step {self._noted_at} of the plan made here still lives {_STEPS_LATER} steps later: "
            f"{', '.join(map(_shown, living[:_MOST_LINES]))}{more}. A list or a dictionary that keeps losses or "
            "outputs keeps what made them: keep loss.item() or output.detach()",
        )

    def _say_of_others(self, now_bytes: int) -> None:
        """Says that something else than tensors grows, unless it is pages of files: the system takes these back."""
        risen_bytes = self._bytes_per_step * (self._num_steps - self._anew_at)
        if mapped_bytes() - self._mapped_bytes >= _LEAST_SHARE * risen_bytes:
            self._begin_anew()
            return
        self._say(
            now_bytes,
            f"no tensor of step {self._noted_at} of the plan is held: it is Python objects, a library's memory, a "
            "cache that fills, or tensors that are kept at some steps only, as those that are logged",
        )

    def _begin_anew(self) -> None:
        self._rise.forget()
        self._note_pages()

    def _note_pages(self) -> None:
        self._anew_at, self._mapped_bytes = self._num_steps, mapped_bytes()

    def _room_bytes(self, now_bytes: int) -> float:
        """Returns what may still be held beside what is; without end where there is no budget."""
        return self._budget_bytes() - now_bytes if self._budget_bytes() else math.inf

    def _say(self, now_bytes: int, cause: str) -> None:
        self._is_said = True
        found = f"memory grows by {format_bytes(int(self._bytes_per_step))} with each step"
        if self._budget_bytes() > now_bytes:
            left = int((self._budget_bytes() - now_bytes) / self._bytes_per_step)
            found += f", and what is held between steps reaches the budget in about {left} of them"
        _log.warning("%s; %s", found, cause)


def _shown(living: Living) -> str:
    line = living.line or "no line of yours"
    first, *others = living.modules or ("",)
    within = f" in {first}{f' and {len(others)} modules more' if others else ''}" if first else ""
    return f"{line}{within} ({format_bytes(living.num_bytes)})"
