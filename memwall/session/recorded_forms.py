"""The forms in which a first step is recorded: what techniques that were allowed have changed in the model for it."""

from torch import nn

from memwall.apply.technique import InRecording, allowed
from memwall.patches import undo_all
from memwall.planning.settings import Settings
from memwall.trace.records import Trace


class RecordedForms:
    """Holds the forms in which a step is recorded, one for each technique that has changed it."""

    def __init__(self) -> None:
        self._present: dict[str, InRecording] = {}

    def begin(self, model: nn.Module, settings: Settings, *, is_streamed: bool) -> None:
        """Changes the model as techniques want it that the user allowed; to be called before the recording.

        Args:
            is_streamed: whether parameters are on disk until their own module is called.
        """
        for technique, handler in allowed(settings.allow):
            if technique.tag not in self._present:
                form = handler.begin_recording(model, settings, is_streamed=is_streamed)
                if form is not None:
                    self._present[technique.tag] = form

    def settled(self, settings: Settings, trace: Trace) -> Settings:
        """Returns the settings with what the recorded step shows of the techniques that it ran with."""
        for form in self._present.values():
            settings = form.settled(settings, trace)
        return settings

    def change(self, model: nn.Module, settings: Settings, trace: Trace, *, is_running: bool) -> bool:
        """Changes the model where nothing fits the budget; False if no technique that is allowed can.

        Args:
            is_running: whether the model's forward is being called right now, by a hook before it.
        """
        for technique, handler in allowed(settings.allow):
            form = handler.record_again(model, trace, is_running=is_running)
            if form is not None:
                self._present[technique.tag] = form
                return True
        return False

    def end(self) -> None:
        """Gives the model back. Safe to call twice."""
        forms, self._present = self._present, {}
        undo_all([form.undo for form in forms.values()])
