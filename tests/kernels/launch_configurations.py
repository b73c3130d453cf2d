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
    kinds = (loss_configurations, glu_configurations, norm_configurations, adamw_configurations, pack_configurations)
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


def adamw_configurations(_: int) -> Iterator[Configuration]:
    """Of the optimizer: the dtypes of parameter and gradient, both kinds of moments, both ways to round."""
    from memwall.triton_kernels._configs import ADAMW_CHUNK, adamw_launch

    tables = {"rows_ptr": "*i64", "chunks_ptr": "*i32", "scalars_ptr": "*fp32", "sums_ptr": "*fp64", "seed": "i64"}
    moments = {"moment_ptr": "*fp32", "first_ptr": "*i8", "second_ptr": "*u8", "unit_ptr": "*fp32"}
    for dtype in ("bf16", "fp16", "fp32"):
        ways = ["nearest", "stochastic"] if dtype == "bf16" else ["nearest"]
        for kind in ("even",) if dtype == "fp16" else ("even", "odd"):
            launch = adamw_launch(kind == "even")
            names = ["square_sum", *(f"{kernel}-{way}" for kernel in ("adamw", "adamw_8bit") for way in ways)]
            for name in names:
                kernel, _, way = name.partition("-")
                yield Configuration(
                    name=f"{name}-{dtype}-{launch.block}-{kind}",
                    kernel=f"{kernel}_kernel",
                    signature={
                        **dict.fromkeys(("tensor_ptr", "param_ptr", "grad_ptr"), f"*{dtype}"),
                        **moments,
                        **tables,
                    },
                    constants={
                        "IS_STOCHASTIC": way == "stochastic",
                        "EVEN": kind == "even",
                        "INTERPRETED": False,
                        "CHUNK": ADAMW_CHUNK,
                        "BLOCK": launch.block,
                    },
                    aligned=("rows_ptr", "chunks_ptr", "scalars_ptr", "sums_ptr"),
                    num_warps=launch.num_warps,
                    fuses=False,
                )


NORMS: dict[str, dict[str, bool]] = {
    "llama": {"ADDS": False, "IS_CENTERED": False, "HAS_BIAS": False, "ROUNDS": True, "WANTS_BIAS": False},
    "llama-add": {"ADDS": True, "IS_CENTERED": False, "HAS_BIAS": False, "ROUNDS": True, "WANTS_BIAS": False},
    "layer": {"ADDS": False, "IS_CENTERED": True, "HAS_BIAS": True, "ROUNDS": False, "WANTS_BIAS": True},
}
NORM_COLUMNS = (64, 512, 1024, 2048, 4096, 8192, 65_536)


def norm_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Of the norms: all launches in bf16, and those that hold most in the other dtypes."""
    from memwall.triton_kernels._configs import norm_backward_launch, norm_launch

    wanted = [("bf16", name, columns) for name in NORMS for columns in NORM_COLUMNS]
    wanted += [("fp32", name, columns) for name in NORMS for columns in (4096, 8192, 65_536)]
    wanted += [("fp16", "llama", 4096), ("bf16", "llama", 4097), ("bf16", "llama", 70_001)]
    for dtype, name, columns in wanted:
        backward = norm_backward_launch(columns, warp_lanes)
        kernels = {"norm": norm_launch(columns, warp_lanes), "norm_backward": backward}
        if name != "llama-add":
            kernels |= {"norm_sums": backward} if columns > backward.block else {}
            kernels |= {"norm_apply": norm_launch(columns, warp_lanes)} if columns in (4096, 4097) else {}
        pointers = [f"{role}_ptr" for role in ("x", "residual", "weight", "bias", "result", "sum", "grad", "grad_sum")]
        pointers += ["grad_x_ptr"]
        wide = [f"{role}_ptr" for role in ("mean", "rstd", "sums", "partial_weight", "partial_bias")]
        strides = [f"{role}_row_stride" for role in ("x", "residual", "grad", "grad_sum")]
        sizes = ["num_rows", "num_columns", "num_tiles", "rows_per_program"]
        kind = "even" if columns % 16 == 0 else "odd"
        for kernel, launch in kernels.items():
            tiles = "row" if columns <= launch.block else "tiles"
            yield Configuration(
                name=f"{kernel}-{name}-{dtype}-{launch.block}-{tiles}-{kind}",
                kernel=f"{kernel}_kernel",
                signature={
                    **dict.fromkeys(pointers, f"*{dtype}"),
                    **dict.fromkeys(wide, "*fp32"),
                    **dict.fromkeys((*sizes, *strides), "i32"),
                    **dict.fromkeys(("eps", "weight_offset"), "fp32"),
                },
                constants={
                    **NORMS[name],
                    **{f"{role}_column_stride": 1 for role in ("x", "residual", "grad", "grad_sum")},
                    "HAS_WEIGHT": True,
                    "WANTS_WEIGHT": True,
                    "ONE_TILE": tiles == "row",
                    "INTERPRETED": False,
                    "BLOCK": launch.block,
                },
                aligned=(*pointers, *wide, *((*strides, "num_columns") if kind == "even" else ())),
                num_warps=launch.num_warps,
            )


def loss_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Of the loss and the pass that scales its gradients; vocabularies that share a launch share a line."""
    from memwall.triton_kernels._configs import row_loss_launch, scaled_copy_launch

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
                            **dict.fromkeys(("coefficient_ptr", "loss_ptr", "lse_ptr"), "*fp32"),
                            **dict.fromkeys(("row_stride", "vocabulary", "ignore_index"), "i32"),
                            **dict.fromkeys(("label_smoothing", "z_loss", "softcap", "logit_scale"), "fp32"),
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
        launch = scaled_copy_launch(warp_lanes)
        for kind in ("even", "odd"):
            yield Configuration(
                name=f"scaled_copy-fp32-{dtype}-{launch.block}-{kind}",
                kernel="scaled_copy_kernel",
                signature={
                    "source_ptr": "*fp32",
                    "factor_ptr": "*fp32",
                    "result_ptr": f"*{dtype}",
                    "num_elements": "i64",
                },
                constants={"INTERPRETED": False, "BLOCK": launch.block},
                aligned=("source_ptr", "result_ptr", *(("num_elements",) if kind == "even" else ())),
                num_warps=launch.num_warps,
            )


def pack_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Of packing and unpacking: both forms, contiguous tensors, and rows of others."""
    from memwall.triton_kernels._configs import pack_launch

    launch = pack_launch(warp_lanes)
    wanted = [(kernel, form, "bf16", "flat") for kernel in ("pack", "unpack") for form in ("int8", "fp8")]
    wanted += [("pack", "int8", "bf16", "rows")]
    for kernel, form, dtype, layout in wanted:
        yield Configuration(
            name=f"{kernel}-{form}-{dtype}-{launch.block}-{layout}-even",
            kernel=f"{kernel}_kernel",
            signature={
                **dict.fromkeys(("x_ptr", "result_ptr"), f"*{dtype}"),
                "codes_ptr": "*i8" if form == "int8" else "*u8",
                "units_ptr": "*fp32",
                **dict.fromkeys(("num_elements", "num_columns", "row_stride"), "i32"),
            },
            constants={
                "column_stride": 1,
                "IS_FP8": form == "fp8",
                "LEVELS": 127.0 if form == "int8" else 448.0,
                "IS_FLAT": layout == "flat",
                "INTERPRETED": False,
                "BLOCK": launch.block,
            },
            aligned=("x_ptr", "codes_ptr", "units_ptr", "result_ptr", "num_elements", "num_columns", "row_stride"),
            num_warps=launch.num_warps,
            fuses=False,
        )
