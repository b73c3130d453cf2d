"""Keeps what a training step changes before its optimizer steps, to do the step again from its beginning."""

import torch
from torch import Tensor, nn

from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.modules import own_buffers

# Batch statistics change without a trace, as the schema of aten::native_batch_norm does not say that it writes to them:
# small buffers are copied in any case. Large ones are tables and masks, as a rule.
_SMALL_BYTES = 1 << 20


class StepState:
    """Keeps the buffers and the gradients of one model.

    Parameters and the optimizer's state are not copied, since nothing changes them before the optimizer steps; where
    something does, `why_not` says so.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self._has_gradients = False
        self._versions: list[tuple[str, Tensor, int]] = []
        self._buffers: dict[tuple[str, str], Tensor | None] = {}
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._constant: dict[tuple[str, str], Tensor] = {}
        """Large buffers that no step has changed so far."""

    @torch.no_grad()
    def take(self) -> None:
        """Takes down what the step that is about to begin finds."""
        self._buffers = {
            (path, name): buffer
            for path, module in self._model.named_modules()
            for name, buffer in own_buffers(module).items()
        }
        for key, tensor in self._buffers.items():
            if tensor is None or self._constant.get(key) is tensor:
                continue
            kept = self._copies.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                self._copies[key] = tensor.clone()
            else:
                kept.copy_(tensor)
        parameters = [*self._model.named_parameters(), *((".".join(key), t) for key, t in self._constant.items())]
        self._versions = [(name.lstrip("."), t, version_of(t)) for name, t in parameters if not t.is_inference()]
        self._gradients = [(p, p.grad) for p in self._model.parameters() if p.requires_grad]
        self._has_gradients = _any([gradient for _, gradient in self._gradients if gradient is not None])

    def drop_constants(self) -> None:
        """Stops copying large buffers that the step which has ended left as they were."""
        for key, copied in list(self._copies.items()):
            tensor = self._buffers.get(key)
            if tensor is not None and copied.nbytes >= _SMALL_BYTES and torch.equal(copied, tensor):
                self._constant[key] = tensor
                del self._copies[key]

    def why_not(self) -> str | None:
        """Returns why the step cannot be done again from its beginning, if something speaks against it."""
        if self._has_gradients:
            return "gradients from before the step were there when it began"
        changed = next((name for name, tensor, version in self._versions if version_of(tensor) != version), None)
        return None if changed is None else f"{changed} was changed before the optimizer stepped"

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back. Copies stay, for the next attempt."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
            if gradient is not None:
                gradient.zero_()
        modules = dict(self._model.named_modules())
        for (path, name), tensor in self._buffers.items():
            own_buffers(modules[path])[name] = tensor
            if tensor is not None and (path, name) in self._copies:
                tensor.copy_(self._copies[path, name])


def _any(tensors: list[Tensor]) -> bool:
    """Returns whether there is anything but zeros in them; waits for each device once."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor.any())
    return any(bool(torch.stack(each).any()) for each in found.values())
