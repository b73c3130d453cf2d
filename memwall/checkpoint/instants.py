"""Says at which instants all that a run commits is of one step, and counts its steps.

Of a loop over `memwall.steps` a step is an iteration in which something was stepped, however often and by however many
optimizers: it ends at the top of the next one. Of another loop it ends with its one optimizer's step.
"""


class Instants:
    """Counts steps.

    Args:
        steps_done: of the run, before this process.

    Attributes:
        is_between_steps: whether a step has ended, and no model has been called since.
        has_stepped: whether an optimizer has stepped in this process.
    """

    def __init__(self, steps_done: int) -> None:
        self.steps_done = steps_done
        self.is_between_steps = self.has_stepped = self._is_counted = self._has_tops = False

    def go_back_to(self, step: int) -> None:
        """Counts on from an earlier step."""
        self.steps_done = step

    def at_top(self) -> None:
        """Says that an iteration begins."""
        self._has_tops = True
        self.is_between_steps, self._is_counted = self.is_between_steps or self._is_counted, False

    def stepped(self) -> None:
        """Says that an optimizer has stepped."""
        self.has_stepped = True
        if not (self._has_tops and self._is_counted):
            self.steps_done += 1
        self._is_counted = True
        self.is_between_steps = not self._has_tops

    def called(self) -> bool:
        """Says that a model is called to be trained; returns whether it is the first call after a step."""
        is_first, self.is_between_steps = self.is_between_steps, False
        return is_first
