"""What gpu_kernels.py measures: each operation, on which shapes, and everybody who can do it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.triton_kernels import geglu, linear_cross_entropy, rms_norm, swiglu
from memwall.triton_kernels.pack import pack, unpack_into

Run = Callable[..., Tensor]
CHUNKS = (256, 1024, 2048, 4096)


@dataclass(frozen=True)
class Case:
    """One operation: what it works on, who can do it, and what it can cost at best."""

    shapes: tuple[tuple[int, ...], ...]
    make: Callable[..., tuple[Tensor, ...]]
    """Tensors for one shape; those of more than one dimension count as activations."""
    eager: Run
    providers: dict[str, Callable[[], Run]]
    elements_moved: tuple[int, int] | None = None
    """Tensors read and written in forward, and in backward; None where matmuls decide."""
    matmul_flops: Callable[..., int] | None = None
    """Of forward and backward, for one shape, where they decide."""


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _loss_inputs(rows: int, hidden: int, vocabulary: int) -> tuple[Tensor, ...]:
    w = (torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5).requires_grad_()
    return _normal(rows, hidden), w, torch.randint(0, vocabulary, (rows,), device="cuda")


def eager_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def eager_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def eager_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """As transformers' Llama has it."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class _Packed(torch.autograd.Function):
    """What unpacking gives back; its gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        unpack_into(pack(x), result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _EagerPacked(torch.autograd.Function):
    """The same by plain torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        blocks = x.float().view(-1, 128)
        units = blocks.abs().amax(1, keepdim=True) / 127.0
        codes = (blocks / units).round().to(torch.int8)
        return (codes.float() * units).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


# Forward is there and back, backward nothing.
_PACK = Case(
    shapes=((8192, 4096), (8192, 14_336)),
    make=lambda rows, columns: (_normal(rows, columns),),
    eager=_EagerPacked.apply,
    providers={"memwall": lambda: _Packed.apply, "eager": lambda: _EagerPacked.apply},
    elements_moved=(3, 0),
)


def _core_loss() -> Run:
    core = getattr(F, "linear_cross_entropy", None)
    if core is None:
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, w, target: core(x, w, target, options=options)


def _imported(module: str, name: str, *extra: Any, **options: Any) -> Callable[[], Run]:
    """A function of another library, called with the tensors and what it wants besides."""

    def make() -> Run:
        function = getattr(importlib.import_module(module), name)
        return lambda *tensors: function(*tensors, *extra, **options)

    return make


def _memwall_loss(chunk_rows: int) -> Callable[[], Run]:
    return lambda: lambda x, w, target: linear_cross_entropy(x, w, target, chunk_rows=chunk_rows)


def _ours_and_eager(ours: Run, eager: Run) -> dict[str, Callable[[], Run]]:
    return {
        "memwall": lambda: ours,
        "eager": lambda: eager,
        "torch.compile": lambda: torch.compile(eager),
    }


_LIGER = "liger_kernel.transformers.functional"
_TOKENS_BY_WIDTH = ((8192, 2816), (8192, 14_336), (8192, 28_672))
_TOKENS_BY_HIDDEN = ((32_768, 1024), (8192, 4096), (8192, 8192), (2048, 32_768))
CASES: dict[str, Case] = {
    "linear_cross_entropy": Case(
        # Llama 3 8B; two shapes of small models with wide vocabularies.
        shapes=((8192, 4096, 128_256), (16_384, 2048, 248_320), (16_384, 1024, 151_936)),
        make=_loss_inputs,
        eager=eager_loss,
        providers={
            **{f"memwall-{rows}": _memwall_loss(rows) for rows in CHUNKS},
            "eager": lambda: eager_loss,
            "torch.compile": lambda: torch.compile(eager_loss),
            "F.linear_cross_entropy": _core_loss,
            "liger": _imported(_LIGER, "liger_fused_linear_cross_entropy"),
            "cut-cross-entropy": _imported("cut_cross_entropy", "linear_cross_entropy", impl="cce"),
            "cut-cross-entropy-exact": _imported("cut_cross_entropy", "linear_cross_entropy", impl="cce_exact"),
            "quack": _imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
        },
        matmul_flops=lambda rows, hidden, vocabulary: 6 * rows * hidden * vocabulary,
    ),
    "swiglu": Case(
        shapes=_TOKENS_BY_WIDTH,
        make=lambda rows, columns: (_normal(rows, columns), _normal(rows, columns)),
        eager=eager_swiglu,
        providers={**_ours_and_eager(swiglu, eager_swiglu), "liger": _imported(_LIGER, "liger_swiglu")},
        elements_moved=(3, 5),
    ),
    "geglu": Case(
        shapes=_TOKENS_BY_WIDTH,
        make=lambda rows, columns: (_normal(rows, columns), _normal(rows, columns)),
        eager=eager_geglu,
        providers={
            **_ours_and_eager(lambda gate, up: geglu(gate, up, approximate="tanh"), eager_geglu),
            "liger": _imported(_LIGER, "liger_geglu"),
        },
        elements_moved=(3, 5),
    ),
    "rms_norm": Case(
        shapes=_TOKENS_BY_HIDDEN,
        make=lambda rows, columns: (_normal(rows, columns), _normal(columns)),
        eager=eager_rms_norm,
        providers={
            **_ours_and_eager(rms_norm, eager_rms_norm),
            "F.rms_norm": lambda: lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
            "liger": _imported(_LIGER, "liger_rms_norm", 1e-6),
            "quack": _imported("quack.rmsnorm", "rmsnorm"),
        },
        elements_moved=(2, 3),
    ),
    "pack": _PACK,
}
