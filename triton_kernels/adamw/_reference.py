"""The plain torch half of `FusedAdamW`, which also is the CPU path. fp64 is computed in fp64: the oracle of the tests.

Operation by operation what the kernel does, so that both give the same bits.
"""

import torch
from torch import Tensor

from .._rows import compute_dtype, row_slices
from ._philox import random_bits
from ._terms import MOMENT_LEVELS, QUANTISED_ELEMENTS, ROOT_CEILING, ROOT_LEVELS, Moments, Scalar

__all__ = ["reference_adamw", "reference_square_sum"]


def reference_square_sum(tensors: list[Tensor], total: Tensor) -> None:
    """Fills `total`, a scalar in fp64, with the sum of the squares of all elements."""
    total.zero_()
    for tensor in tensors:
        flat = _flat(tensor)
        for part in row_slices(flat.numel(), 1):
            total += flat[part].double().square().sum()


def reference_adamw(
    params: list[Tensor], grads: list[Tensor], moments: Moments, scalars: Tensor, numbers: list[int], seed: int | None
) -> None:
    """One step of each parameter, in place.

    Args:
        params: dense, any shapes.
        grads: alike, with the strides of their parameters.
        moments: likewise, in the compute dtype or quantised.
        scalars: [parameters, len(Scalar)], in the compute dtype.
        numbers: of each parameter, distinct: they tell the parameters' random bits apart.
        seed: of stochastic rounding; None rounds to nearest.
    """
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        row = scalars[index]
        ours = Moments(*(tensors[index : index + 1] for tensors in moments))
        flat_param, flat_grad = _flat(param), _flat(grad)
        for part in row_slices(flat_param.numel(), 1):
            first, second = _read(ours, part)
            wide = compute_dtype(param.dtype)
            gradient = flat_grad[part].to(wide) * row[Scalar.GRADIENT_FACTOR]
            value = flat_param[part].to(wide) * row[Scalar.DECAY]
            first = first + (gradient - first) * row[Scalar.FIRST_SHARE]
            second = second * row[Scalar.SECOND_DECAY] + gradient * gradient * row[Scalar.SECOND_SHARE]
            root = _square_root(second)
            deviation = root * row[Scalar.ROOT_FACTOR] + row[Scalar.EPS]
            value = value - first / deviation * row[Scalar.STEP_SIZE]
            _write(ours, part, first, second, root)
            if seed is None:
                flat_param[part] = value
            else:
                step = row[Scalar.STEP].long()
                bits = random_bits(seed, part.start, value.numel(), step, numbers[index], value.device)
                flat_param[part] = _stochastically_rounded(value, bits)


def _square_root(values: Tensor) -> Tensor:
    """Correctly rounded: torch's own in fp32 comes from a library of vector functions, which may be off by one ulp."""
    return values.double().sqrt().to(values.dtype)


def _flat(tensor: Tensor) -> Tensor:
    """Elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _read(moments: Moments, part: slice) -> tuple[Tensor, Tensor]:
    first, second = _flat(moments.exp_avgs[0])[part], _flat(moments.exp_avg_sqs[0])[part]
    if not moments.exp_avg_units:
        return first, second
    units = (_spread(unit[0], part, first.numel()) for unit in (moments.exp_avg_units, moments.exp_avg_sq_units))
    first_unit, root_unit = units
    root = second.float() * second.float() * root_unit
    return first.float() * first_unit, root * root


def _spread(units: Tensor, part: slice, num_elements: int) -> Tensor:
    """The unit of each element. Slices begin where blocks do."""
    begin = part.start // QUANTISED_ELEMENTS
    end = begin + -(-num_elements // QUANTISED_ELEMENTS)
    return units[begin:end].repeat_interleave(QUANTISED_ELEMENTS)[:num_elements]


def _write(moments: Moments, part: slice, first: Tensor, second: Tensor, root: Tensor) -> None:
    exp_avg, exp_avg_sq = _flat(moments.exp_avgs[0]), _flat(moments.exp_avg_sqs[0])
    if not moments.exp_avg_units:
        exp_avg[part], exp_avg_sq[part] = first, second
        return
    codes, units = _quantised(first, MOMENT_LEVELS)
    exp_avg[part] = torch.round(codes).to(torch.int8)
    moments.exp_avg_units[0][_blocks(part, units)] = units
    squares, units = _quantised(root, ROOT_LEVELS**2)
    codes = _square_root(squares)
    exp_avg_sq[part] = torch.where(codes < ROOT_CEILING, torch.ceil(codes), torch.round(codes)).to(torch.uint8)
    moments.exp_avg_sq_units[0][_blocks(part, units)] = units


def _blocks(part: slice, units: Tensor) -> slice:
    begin = part.start // QUANTISED_ELEMENTS
    return slice(begin, begin + units.numel())


def _quantised(values: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Values in units of their block, not yet rounded, and each block's unit: its largest magnitude / levels."""
    padding = -values.numel() % QUANTISED_ELEMENTS
    blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, QUANTISED_ELEMENTS)
    is_number = blocks == blocks
    units = torch.where(is_number, blocks.abs(), 0.0).amax(1) / num_levels
    codes = blocks * (1.0 / torch.where(units > 0.0, units, 1.0)).unsqueeze(1)
    # A block with NaN is NaN when it is read again, whatever its codes are.
    codes = torch.where(codes == codes, codes, 0.0).clamp(-num_levels, num_levels)
    units = torch.where(is_number.all(1), units, torch.nan)
    return codes.view(-1)[: values.numel()], units


def _stochastically_rounded(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 `values` as bf16, up with the probability of what is cut off."""
    up = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(values.isfinite(), up.view(torch.float32), values).to(torch.bfloat16)
