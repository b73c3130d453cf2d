"""Keeps what a training step changes before its optimizer steps, to do the step again from its beginning."""

import torch
from torch import Tensor, nn

from memwall.apply.optimizer_state.spent_gradient import SpentGradient
from memwall.session.model_state import ModelState
from memwall.torch_internals.autograd import version_of


class StepState:
    """Keeps the buffers, the attributes and the gradients of one model, and random numbers.

    Parameters and the optimizer's state are not copied, since nothing changes them before the optimizer steps; where
    something does, `why_not` says so.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self._has_gradients = False
        self._versions: list[tuple[str, Tensor, int]] = []
        self._of_model = ModelState(model)

    @torch.no_grad()
    def take(self) -> None:
        """Takes down what the step that is about to begin finds."""
        self._of_model.take()
        self._versions = [(n, p, version_of(p)) for n, p in self._model.named_parameters() if not p.is_inference()]
        self._gradients = [(p, p.grad) for p in self._model.parameters() if p.requires_grad]
        present = [gradient for _, gradient in self._gradients if gradient is not None]
        self._has_gradients = any(isinstance(one, SpentGradient) for one in present) or _any(present)

    def drop_constants(self) -> None:
        """Stops copying large buffers that the step which has ended left as they were."""
        self._of_model.settle()

    def why_not(self) -> str | None:
        """Returns why the step cannot be done again from its beginning, if something speaks against it."""
        if self._has_gradients:
            return "gradients from before the step were there when it began"
        changed = next((name for name, tensor, version in self._versions if version_of(tensor) != version), None)
        return self._of_model.why_not() if changed is None else f"{changed} was changed before the optimizer stepped"

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back. Copies stay, for the next attempt."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
            if gradient is not None:
                gradient.zero_()
        self._of_model.put_back()


def _any(tensors: list[Tensor]) -> bool:
    """Returns whether there is anything but zeros in them; waits for each device once."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor.any())
    return any(bool(torch.stack(each).any()) for each in found.values())
