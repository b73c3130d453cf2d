"""Packs the linear layers of a frozen base as bitsandbytes does: 4 bits a weight (NF4), with double quantisation.

A packed layer here has the bytes of the real one and none of its values: what it unpacks is zeros.

Source: bitsandbytes 0.50.2, functional.py (`quantize_4bit`, `dequantize_4bit`), autograd/_functions.py (`MatMul4Bit`),
backends/cuda/ops.py (`_dequant_linear_fallback`: what forward does beyond 1,536 tokens; below it may unpack nothing);
transformers 5.23, quantizers/base.py (`get_keys_to_not_convert`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_BLOCK, _NESTED_BLOCK = 64, 256


def packed_names(model: Any, linear: dict[str, tuple[int, int]]) -> list[str]:
    """Returns which of the linear layers are packed: all but the output's and the last module."""
    kept = model.get_output_embeddings()
    last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    return [name for name in linear if name != last and model.get_submodule(name) is not kept]


def packed(layer: "nn.Module", num_in: int, num_out: int) -> "nn.Module":
    """Returns a layer of the same shape with its weight in 4 bits; the bias stays as it is."""
    import torch
    from torch import Tensor, nn

    weight: Any = layer.weight
    bias: Any = layer.bias
    num_weights = num_in * num_out
    num_blocks = -(-num_weights // _BLOCK)

    class Product(torch.autograd.Function):
        """Multiplies by a weight that is unpacked anew in forward and in backward, and saves none."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, module: "Packed") -> Tensor:
            ctx.module = module
            unscaled = module.absmax.to(torch.float32)
            return nn.functional.linear(x, module.unpacked(unscaled + module.offset, x.dtype), module.bias)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            module, (gradient,) = ctx.module, gradients
            scale = module.absmax.to(torch.float32)
            scale += module.offset
            return torch.matmul(gradient, module.unpacked(scale, gradient.dtype)), None

    class Packed(nn.Module):
        """Holds what bitsandbytes' Linear4bit holds."""

        absmax: Tensor
        bias: nn.Parameter | None
        offset: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = num_in, num_out
            self.compute_dtype: torch.dtype = weight.dtype
            self.bias = bias
            device = weight.device
            self.weight = nn.Parameter(
                torch.zeros((num_weights + 1) // 2, 1, dtype=torch.uint8, device=device), requires_grad=False
            )
            sizes = {"nested_absmax": -(-num_blocks // _NESTED_BLOCK), "nested_code": 256, "code": 16}
            self.register_buffer("absmax", torch.zeros(num_blocks, dtype=torch.uint8, device=device))
            for name, size in sizes.items():
                self.register_buffer(name, torch.zeros(size, dtype=torch.float32, device=device))
            self.register_buffer("offset", torch.zeros((), dtype=torch.float32, device=device))

        def unpacked(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
            """Returns a whole weight beside the scales of its blocks, which live as long as the call."""
            return scale.new_zeros((num_out, num_in), dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            product: Any = Product.apply
            result: Tensor = product(x.to(self.compute_dtype), self)
            return result.to(x.dtype)

    return Packed()
