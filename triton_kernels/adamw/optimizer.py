"""`FusedAdamW`: AdamW over many tensors in a few launches, moments in fp32 or 8 bits, clipping in the same pass.

The norm of all gradients takes one pass over them; the factor that follows from it stays on the device and is applied
as the update reads the gradient, so that gradients are neither rewritten nor waited for. With moments in fp32 and
parameters of 32 bits the label of the action is *equivalent* to `torch.optim.AdamW`; stochastic rounding and moments
of 8 bits *change numerics*.

triton_kernels/README.md says when to take torch's, torchao's or FlashOptim's optimizer instead.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from memwall.errors import UsageError
from memwall.torch_internals.operators import foreach_add_

from .._rows import DTYPES
from ._cost import AdamWShape, cost
from ._ops import adamw_op, square_sum_op
from ._state import MomentBits, check_fits, is_quantised, loaded_state, new_state
from ._terms import Scalar

__all__ = ["AdamWShape", "FusedAdamW", "cost"]

_Item = TypeVar("_Item")


class FusedAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with the arithmetic of `torch.optim.AdamW` in fp32.

    Every option but `max_norm` may differ from group to group. The host never waits for the device. Inside a CUDA graph
    give `lr` as a tensor on the device, where the learning rate is to change.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = FusedAdamW([weight], lr=0.1, max_norm=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()
    >>> weight, optimizer.grad_norm
    (Parameter containing:
    tensor([ 0.8990, -2.0980], requires_grad=True), tensor(5.))
    """

    grad_norm: Tensor | None
    """Of all gradients before clipping, in the latest step; None without `max_norm`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        moment_bits: MomentBits = 32,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        """What is trained, and how.

        Args:
            params: tensors or groups, as of any torch optimizer; dense, of 16 to 64 bits, all on one device.
            lr: learning rate; a tensor is read on its device.
            betas: decay of both moments.
            eps: added to the second moment's root.
            weight_decay: decoupled.
            maximize: climb.
            max_norm: gradients are scaled so that their global norm is no larger, as
                `torch.nn.utils.clip_grad_norm_` does; None leaves them.
            moment_bits: 32: moments in fp32 whatever the parameter's dtype. 8: int8 and uint8 with two fp32 units for
                256 elements, 2.03 bytes for both. Tensors of less than 4,096 elements, vectors of less than 65,536
                and fp64 keep 32.
            stochastic_rounding: of bfloat16 parameters; the mean of many roundings is the fp32 value. Others are
                rounded to nearest.
            seed: of stochastic rounding. The same seed, step and order of parameters give the same bits, on CPU and
                GPU alike.

        Raises:
            UsageError: an option is out of its range.
        """
        self.max_norm = max_norm
        self.grad_norm = None
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        ours = {"moment_bits": moment_bits, "stochastic_rounding": stochastic_rounding, "seed": seed}
        if max_norm is not None and not max_norm > 0.0:
            raise UsageError(f"max_norm must be above 0, found {max_norm}; None does not clip")
        super().__init__(params, {**options, **ours})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds tensors to train, with options of their own.

        Raises:
            UsageError: an option is out of its range.
        """
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_norm": self.max_norm, "grad_norm": None}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            UsageError: a gradient or parameter is of a kind that is not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = {p: number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}
        work = [[(p, _gradient(p)) for p in group["params"] if p.grad is not None] for group in self.param_groups]
        devices = {p.device for pairs in work for p, _ in pairs}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise UsageError(f"FusedAdamW wants all parameters on one device, found {names}; make an optimizer of each")
        # All that can be refused is, before anything is changed.
        for group, pairs in zip(self.param_groups, work, strict=True):
            for p, _ in pairs:
                if self.state[p]:
                    check_fits(p, self.state[p])
                else:
                    self.state[p].update(new_state(p, group["moment_bits"]))
        factor = self._clipping_factor([grad for pairs in work for _, grad in pairs])
        for group, pairs in zip(self.param_groups, work, strict=True):
            if pairs:
                self._step_group(group, pairs, numbers, factor)
        return loss

    def _clipping_factor(self, grads: list[Tensor]) -> Tensor | float:
        if self.max_norm is None or not grads:
            return 1.0
        sums = [square_sum_op(same) for same in _by_kind(grads, lambda grad: grad.dtype)]
        norm = torch.stack(sums).sum().sqrt()
        self.grad_norm = norm.float()
        # 1e-6 as torch.nn.utils.clip_grad_norm_ adds it.
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    def _step_group(
        self,
        group: dict[str, Any],
        pairs: list[tuple[Tensor, Tensor]],
        numbers: dict[Tensor, int],
        factor: Tensor | float,
    ) -> None:
        # Each kind is one launch; sizes that are no multiple of 16 apart, as they spoil wide loads for all.
        kinds = _by_kind(
            pairs,
            lambda pair: (pair[0].dtype, pair[1].dtype, is_quantised(self.state[pair[0]]), pair[0].numel() % 16 == 0),
        )
        states = [[self.state[p] for p, _ in kind] for kind in kinds]
        steps = [state["step"] for kind_states in states for state in kind_states]
        foreach_add_(steps, 1.0)
        scalars = _scalars(group, torch.stack(steps).double(), factor)
        begin = 0
        for kind, kind_states in zip(kinds, states, strict=True):
            params, grads = [p for p, _ in kind], [grad for _, grad in kind]
            is_stochastic = group["stochastic_rounding"] and params[0].dtype == torch.bfloat16
            adamw_op(
                params,
                grads,
                *(_all_of(kind_states, name) for name in ("exp_avg", "exp_avg_sq", "exp_avg_unit", "exp_avg_sq_unit")),
                scalars[begin : begin + len(kind)],
                [numbers[p] for p in params],
                group["seed"] if is_stochastic else None,
            )
            begin += len(kind)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, of this class or, without quantised moments, of `torch.optim.AdamW`.

        Moments keep their dtypes; torch's own method would cast them to the parameter's.

        Raises:
            UsageError: moments are of another kind than the groups ask for, or options are not supported.
        """
        sizes = (
            [len(group["params"]) for group in groups] for groups in (self.param_groups, state_dict["param_groups"])
        )
        if len({tuple(found) for found in sizes}) > 1:
            # Which raises, as with any torch optimizer.
            return super().load_state_dict(state_dict)
        groups = [{**own, **saved} for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True)]
        for own, group in zip(self.param_groups, groups, strict=True):
            _check_options(group)
            if group["moment_bits"] != own["moment_bits"]:
                raise UsageError(
                    f"the state has moments of {group['moment_bits']} bits, this optimizer was made for "
                    f"{own['moment_bits']}; make it with moment_bits={group['moment_bits']}"
                )
        states = {
            p: loaded_state(p, state_dict["state"][key], own["moment_bits"])
            for own, group in zip(self.param_groups, groups, strict=True)
            for p, key in zip(own["params"], group["params"], strict=True)
            if key in state_dict["state"]
        }
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        self.state.update(states)
        return None


def _check_options(group: dict[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if not isinstance(lr, Tensor) and not lr >= 0.0:
        raise UsageError(f"lr must not be negative, found {lr}")
    if not all(isinstance(beta, float | int) and 0.0 <= beta < 1.0 for beta in betas):
        raise UsageError(f"betas are two numbers from 0 to below 1, found {betas}")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise UsageError(f"{name} must not be negative, found {group[name]}")
    if group["moment_bits"] not in (8, 32):
        raise UsageError(f"moment_bits is 8 or 32, not {group['moment_bits']}")
    if not 0 <= group["seed"] < 1 << 63:
        raise UsageError(f"seed must be from 0 to below 2^63, found {group['seed']}")
    if group.get("amsgrad"):
        raise UsageError("FusedAdamW has no amsgrad; take torch.optim.AdamW(amsgrad=True, fused=True)")


def _gradient(p: Tensor) -> Tensor:
    """The gradient, laid out as its parameter is; a copy only where it is not."""
    grad = p.grad
    if grad is None or grad.layout != torch.strided or hasattr(p, "to_local"):
        found = (
            "a sharded tensor" if hasattr(p, "to_local") else f"a gradient of layout {getattr(grad, 'layout', None)}"
        )
        raise UsageError(f"FusedAdamW wants whole dense tensors, found {found}; take torch.optim.AdamW(fused=True)")
    if not {p.dtype, grad.dtype} <= set(DTYPES):
        raise UsageError(f"FusedAdamW wants floating dtypes of 16 to 64 bits, found {p.dtype} and {grad.dtype}")
    if grad.stride() == p.stride():
        return grad
    return torch.empty_like(p, dtype=grad.dtype).copy_(grad)


def _by_kind(items: list[_Item], kind: Callable[[_Item], Any]) -> list[list[_Item]]:
    """Items of one kind together, in their order."""
    found: dict[Any, list[_Item]] = {}
    for item in items:
        found.setdefault(kind(item), []).append(item)
    return list(found.values())


def _all_of(states: list[dict[str, Tensor]], name: str) -> list[Tensor]:
    return [state[name] for state in states] if name in states[0] else []


def _scalars(group: dict[str, Any], steps: Tensor, factor: Tensor | float) -> Tensor:
    """[parameters, len(Scalar)] fp64, on the parameters' device."""
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    if isinstance(lr, Tensor):
        # Of a tensor on the host the value is at hand.
        lr = float(lr) if lr.device.type == "cpu" else lr.double()
    values = {
        Scalar.GRADIENT_FACTOR: -factor if group["maximize"] else factor,
        Scalar.DECAY: 1.0 - lr * group["weight_decay"],
        Scalar.FIRST_SHARE: 1.0 - beta1,
        Scalar.SECOND_DECAY: beta2,
        Scalar.SECOND_SHARE: 1.0 - beta2,
        Scalar.STEP_SIZE: lr / (1.0 - torch.pow(beta1, steps)),
        Scalar.ROOT_FACTOR: (1.0 - torch.pow(beta2, steps)).rsqrt(),
        Scalar.EPS: group["eps"],
        Scalar.STEP: steps,
    }
    table = torch.empty(steps.numel(), len(Scalar), dtype=torch.float64, device=steps.device)
    for column, value in values.items():
        if isinstance(value, Tensor):
            table[:, column].copy_(value)
        else:
            table[:, column].fill_(value)
    return table
