"""How every kernel is launched, as test_ahead_of_time.py compiles it: dtypes, alignment, what is left out."""

from collections.abc import Iterator
from typing import Any, NamedTuple

VOCABULARIES = (250, 500, 1000, 2000, 32_000, 50_257, 128_256, 262_144)


class Configuration(NamedTuple):
    """One way a kernel is launched."""

    name: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    """Parameters that the launcher guarantees to be divisible by 16."""
    num_warps: int
    fuses: bool = True
    """Multiplication and addition, as the launcher says."""


def configurations(warp_lanes: int) -> Iterator[Configuration]:
    """All that _configs.py can give, over the dtypes, each once."""
    kinds = (
        loss_configurations,
        glu_configurations,
        adamw_8bit_configurations,
        pack_configurations,
    )
    yield from {found.name: found for kind in kinds for found in kind(warp_lanes)}.values()


def glu_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Of the gated activation: contiguous tensors, or rows of a packed one, which are compiled alike."""
    from memwall.triton_kernels._configs import glu_launch

    launch = glu_launch(warp_lanes)
    for dtype in ("bf16", "fp16", "fp32"):
        for activation in ("silu", "gelu", "gelu_tanh"):
            for direction, tensors in (
                ("glu", ("gate", "up", "product")),
                ("glu_backward", ("grad", "gate", "up", "grad_gate", "grad_up")),
            ):
                pointers = [f"{name}_ptr" for name in tensors]
                row_strides = [f"{name}_row_stride" for name in (*tensors, "result")]
                for kind in ("even", "odd") if activation == "silu" else ("even",):
                    yield Configuration(
                        name=f"{direction}-{activation}-{dtype}-{launch.block}-{kind}",
                        kernel=f"{direction}_kernel",
                        signature={
                            **dict.fromkeys(pointers, f"*{dtype}"),
                            **dict.fromkeys(("num_columns", "num_blocks", *row_strides), "i32"),
                        },
                        constants={
                            **{f"{name}_column_stride": 1 for name in tensors[:-1]},
                            "KIND": activation,
                            "INTERPRETED": False,
                            "BLOCK": launch.block,
                        },
                        aligned=(*pointers, *row_strides, *(("num_columns",) if kind == "even" else ())),
                        num_warps=launch.num_warps,
                    )


def adamw_8bit_configurations(_: int) -> Iterator[Configuration]:
    """Of the optimizer's step: the dtypes of parameter and gradient."""
    from memwall.triton_kernels._configs import adamw_8bit_launch

    launch = adamw_8bit_launch()
    pointers = ("param_ptr", "grad_ptr", "first_ptr", "root_ptr", "first_units_ptr", "root_units_ptr")
    scalars = ("decay", "first_share", "second_decay", "second_share", "step_size", "root_factor", "eps")
    for dtype in ("bf16", "fp16", "fp32"):
        for kind in ("even", "odd"):
            yield Configuration(
                name=f"adamw_8bit-{dtype}-{launch.block}-{kind}",
                kernel="adamw_8bit_kernel",
                signature={
                    **dict.fromkeys(("param_ptr", "grad_ptr"), f"*{dtype}"),
                    "first_ptr": "*i8",
                    "root_ptr": "*u8",
                    "num_elements": "i32",
                    **dict.fromkeys(("first_units_ptr", "root_units_ptr"), "*fp32"),
                    **dict.fromkeys(scalars, "fp32"),
                },
                constants={"INTERPRETED": False, "BLOCK": launch.block},
                aligned=(*pointers, *(("num_elements",) if kind == "even" else ())),
                num_warps=launch.num_warps,
                fuses=False,
            )


def loss_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Yields those of the loss; vocabularies that share a launch share a line."""
    from memwall.triton_kernels._configs import row_loss_launch

    for dtype in ("bf16", "fp16", "fp32"):
        for full in (False, True):
            for is_multiple in (False, True):
                launches = {row_loss_launch(v, warp_lanes) for v in VOCABULARIES if (v % 16 == 0) is is_multiple}
                kind = f"{'all' if full else 'plain'}-{'even' if is_multiple else 'odd'}"
                for launch in sorted(launches):
                    yield Configuration(
                        name=f"row_loss-{dtype}-{launch.block}-{kind}",
                        kernel="row_loss_kernel",
                        signature={
                            "logits_ptr": f"*{dtype}",
                            "target_ptr": "*i64",
                            **dict.fromkeys(("coefficient_ptr", "loss_ptr"), "*fp32"),
                            **dict.fromkeys(("row_stride", "vocabulary", "ignore_index"), "i32"),
                            **dict.fromkeys(("label_smoothing", "softcap", "logit_scale"), "fp32"),
                        },
                        constants={
                            "HAS_SOFTCAP": full,
                            "HAS_SMOOTHING": full,
                            "WRITES_GRADIENT": True,
                            "INTERPRETED": False,
                            "BLOCK": launch.block,
                        },
                        aligned=("logits_ptr", "row_stride", *(("vocabulary",) if is_multiple else ())),
                        num_warps=launch.num_warps,
                    )


def pack_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Returns those of packing and unpacking."""
    from memwall.triton_kernels._configs import pack_launch

    launch = pack_launch(warp_lanes)
    for kernel in ("pack", "unpack"):
        yield Configuration(
            name=f"{kernel}-bf16-{launch.block}-even",
            kernel=f"{kernel}_kernel",
            signature={
                **dict.fromkeys(("x_ptr", "result_ptr"), "*bf16"),
                "codes_ptr": "*i8",
                "units_ptr": "*fp32",
                "num_elements": "i32",
            },
            constants={
                "LEVELS": 127.0,
                "INTERPRETED": False,
                "BLOCK": launch.block,
            },
            aligned=("x_ptr", "codes_ptr", "units_ptr", "result_ptr", "num_elements"),
            num_warps=launch.num_warps,
            fuses=False,
        )
