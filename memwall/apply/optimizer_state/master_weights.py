"""Float32 master weights: low-precision parameters whose optimizer steps a float32 copy of them.

    AdamW = memwall.with_master_weights(torch.optim.AdamW)
    optimizer = AdamW(model.parameters(), lr=1e-4)

Of a parameter in bfloat16 or float16 a small update is lost when it is rounded away. Here the update is of the master,
with moments and a gradient in float32, and the parameter is the master, rounded. The master is an entry of the
parameter's state: it is saved and loaded with it, and lies on disk where a plan has the state there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memwall.apply.optimizer_state.partial_step import below_hooks, is_stepped_alone, step_some
from memwall.errors import ApplyError

MASTER = "master_weight"
"""Its key in a parameter's state."""
_LOW = (torch.bfloat16, torch.float16)
_made: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {}


def is_low_precision(parameter: Tensor) -> bool:
    """Returns whether a parameter has a master."""
    return parameter.dtype in _LOW


def has_master_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer keeps a master of each low-precision parameter."""
    return hasattr(below_hooks(type(optimizer).step), "steps_as")


def with_master_weights(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns the class with float32 master weights for low-precision parameters; others are stepped as ever.

    A master is made from its parameter at the first step. Where somebody else has changed elements of the parameter
    since, as by loading weights into the model, these are the master's from then on.

    Args:
        kind: a class whose state memwall can keep on disk, of torch.optim or lion-pytorch's Lion.

    Raises:
        ApplyError: it is another one: how it steps is not known, or not parameter by parameter.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and is_stepped_alone(kind)):
        raise ApplyError(
            "master weights are known for the classes of torch.optim that step each parameter alone and for "
            f"lion-pytorch's Lion, and {kind!r} is none of them; give one of these, as in "
            "memwall.with_master_weights(torch.optim.AdamW)"
        )
    if hasattr(below_hooks(kind.step), "steps_as"):
        return kind
    if kind not in _made:
        _made[kind] = _with_master_weights(kind)
    return _made[kind]


def _with_master_weights(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    base: Any = kind
    inner = below_hooks(base.step)

    class WithMasterWeights(base):  # type: ignore[misc]
        __doc__ = kind.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for group in self.param_groups:
                for parameter in filter(is_low_precision, group["params"]):
                    if "sum" in self.state.get(parameter, {}):  # Adagrad, alone, has state before its first step
                        start = group["initial_accumulator_value"]
                        self.state[parameter]["sum"] = torch.full_like(parameter, start, dtype=torch.float32)

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for number, group in enumerate(self.param_groups):
                low = [p for p in group["params"] if is_low_precision(p) and p.grad is not None]
                others = [p for p in group["params"] if not is_low_precision(p)]
                if low and group.get("differentiable"):
                    raise ApplyError(
                        f"a differentiable {kind.__name__} keeps its updates in the graph, and that of master weights "
                        "is rounded outside it; pass differentiable=False, or leave with_master_weights out"
                    )
                if others:
                    step_some(self, inner, [(number, others)], ((), {}))
                for parameter in low:
                    _step_master(self, inner, number, parameter)
            return loss

        step.steps_as = inner  # type: ignore[attr-defined]

        def load_state_dict(self, state_dict: Any) -> None:
            """Loads state as torch does, which would round it to the dtype of its parameter."""
            loaded: list[_Exact] = []
            # After all hooks that change what is loaded, and before all that look at what was.
            handles = (
                self.register_load_state_dict_pre_hook(lambda _, given: loaded.extend(_float32_state(self, given))),
                self.register_load_state_dict_post_hook(lambda _: _put_back(self, loaded), prepend=True),
            )
            try:
                super().load_state_dict(state_dict)
            finally:
                for handle in handles:
                    handle.remove()

        def __reduce_ex__(self, protocol: Any) -> Any:
            if type(self) is not WithMasterWeights:  # a class that somebody has derived has a name of its own
                return super().__reduce_ex__(protocol)
            return _empty, (kind,), self.__getstate__()

    # What a trace and a plan know it by: it steps as that one does.
    WithMasterWeights.__name__ = kind.__name__
    WithMasterWeights.__qualname__ = f"with_master_weights({kind.__qualname__})"
    return WithMasterWeights


def _step_master(optimizer: torch.optim.Optimizer, inner: Callable[..., Any], number: int, parameter: Tensor) -> None:
    """Has the optimizer step the master as a parameter of its own, with the parameter's state and gradient."""
    state = optimizer.state[parameter]
    assert parameter.grad is not None
    for key, value in state.items():  # of an optimizer without masters, whose state was loaded
        if isinstance(value, Tensor) and value.dtype in _LOW:
            state[key] = value.float()
    master = _master_of(parameter, state.get(MASTER))
    master.grad = parameter.grad.float()
    # Until here memory may run out, and nothing has changed. An optimizer makes state only where there is none at all.
    state.pop(MASTER, None)
    optimizer.state[master] = state
    try:
        step_some(optimizer, inner, [(number, [master])], ((), {}))
    finally:
        # Also of a step that failed: a parameter that differs from its master counts as changed by somebody else.
        del optimizer.state[master]
        master.grad = None
        state[MASTER] = master
        parameter.copy_(master)


def _master_of(parameter: Tensor, master: Tensor | None) -> Tensor:
    current = parameter.detach()
    if master is None:
        return current.to(torch.float32, copy=True)
    is_own = master.to(parameter.dtype) == current
    # In place, for where it lies is where its bucket is read and written; and without asking, which a device waits for.
    return torch.where(is_own, master, current.float(), out=master)


_Exact = tuple[Tensor, dict[Any, Tensor]]
"""Is a parameter, and what a state dict has for it in float32."""


def _float32_state(optimizer: torch.optim.Optimizer, state_dict: Any) -> list[_Exact]:
    """Returns those of low-precision parameters; torch matches those of a state dict by their order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    found = []
    for parameter, number in zip(parameters, numbers, strict=False):  # of other lengths torch refuses
        if is_low_precision(parameter):
            # Counts of steps torch does not round, and leaves on the host where that is their place.
            values = {k: value for k, value in state_dict["state"].get(number, {}).items() if k != "step"}
            exact = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dtype == torch.float32}
            found.append((parameter, exact))
    return found


def _put_back(optimizer: torch.optim.Optimizer, loaded: list[_Exact]) -> None:
    for parameter, values in loaded:
        for key, value in values.items():
            optimizer.state[parameter][key] = value.to(parameter.device, copy=True)


def _empty(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    made = with_master_weights(kind)
    return made.__new__(made)
