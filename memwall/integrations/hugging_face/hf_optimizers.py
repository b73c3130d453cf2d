"""Makes optimizers by name, for a configuration that says nothing about its training."""

import difflib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from memwall.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Class in torch.optim and its arguments. Learning rates decide nothing about memory; implementations left open are
# torch's choice. SGD has a momentum only where the name says so, as with transformers' Trainer.
_MAKERS: dict[str, tuple[str, dict[str, object]]] = {
    "adamw": ("AdamW", {}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "adamw-foreach": ("AdamW", {"foreach": True}),
    "adam": ("Adam", {}),
    "adam-fused": ("Adam", {"fused": True}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adafactor": ("Adafactor", {}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "asgd": ("ASGD", {}),
    "rprop": ("Rprop", {}),
}
OPTIMIZERS = tuple(_MAKERS)

# Other libraries' optimizers: their steps launch kernels of their own, which need real tensors on a device.
_ELSEWHERE = ("8bit", "8-bit", "4bit", "4-bit", "bnb", "paged", "lion", "galore", "ademamix", "apollo", "lomo")
_FACTORY = (
    "write a factory that returns a memwall.Workload with it, or with a stand-in whose state is as large, and give it "
    "as path/file.py:factory"
)


def check_optimizer(name: str) -> None:
    """Checks that `make_optimizer` knows the name.

    Raises:
        UsageError: it does not; the message says what there is, and what to do for optimizers of other libraries.
    """
    if name in _MAKERS:
        return
    if any(part in name.lower() for part in _ELSEWHERE):
        raise UsageError(
            f"optimizer '{name}' is not one of torch.optim, and its library's kernels can't run without a device: "
            f"{_FACTORY}"
        )
    near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
    meant = f"; did you mean {near[0]}" if near else ""
    raise UsageError(f"optimizer '{name}' is not known; expected one of {', '.join(OPTIMIZERS)}{meant}")


def make_optimizer(name: str, parameters: Iterable[Any]) -> "Optimizer":
    """Returns the optimizer of that name, see `check_optimizer`, over these parameters."""
    from torch import optim

    class_name, arguments = _MAKERS[name]
    maker: Callable[..., Optimizer] = getattr(optim, class_name)
    return maker(parameters, lr=1e-4, **arguments)
