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
    kinds = (loss_configurations, glu_configurations, norm_configurations, adamw_configurations)
    kinds += (softmax_loss_configurations, rope_configurations, dropout_configurations, pack_configurations)
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


def softmax_loss_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Of the loss of given logits: rows that start aligned, and rows that do not."""
    from memwall.triton_kernels._configs import row_loss_launch

    wanted = [("bf16", False, 32_000), ("bf16", True, 50_257), ("fp16", True, 128_256), ("fp32", True, 128_256)]
    for dtype, full, vocabulary in wanted:
        launch = row_loss_launch(vocabulary, warp_lanes)
        kind = "even" if vocabulary % 16 == 0 else "odd"
        pointers = ["logits_ptr", "result_ptr"]
        rows = [f"{name}_ptr" for name in ("loss", "upstream", "largest", "total")]
        strides = [f"{prefix}{name}_stride" for prefix in ("", "result_") for name in ("outer", "inner")]
        for kernel in ("softmax_loss", "softmax_gradient"):
            yield Configuration(
                name=f"{kernel}-{dtype}-{launch.block}-{'all' if full else 'plain'}-{kind}",
                kernel=f"{kernel}_kernel",
                signature={
                    **dict.fromkeys(pointers, f"*{dtype}"),
                    **dict.fromkeys(rows, "*fp32"),
                    "target_ptr": "*i64",
                    **dict.fromkeys((*strides, "num_inner", "vocabulary", "ignore_index", "upstream_stride"), "i32"),
                    **dict.fromkeys(("label_smoothing", "z_loss", "softcap", "logit_scale"), "fp32"),
                },
                constants={
                    "column_stride": 1,
                    "result_column_stride": 1,
                    "HAS_SOFTCAP": full,
                    "HAS_SMOOTHING": full,
                    "INTERPRETED": False,
                    "BLOCK": launch.block,
                },
                aligned=(*pointers, *((*strides, "vocabulary") if kind == "even" else ())),
                num_warps=launch.num_warps,
            )


def rope_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Of the rotation, as [batch, T, heads, D] lies in memory: both orders of pairs, heads that are rotated in part."""
    from memwall.triton_kernels._configs import rope_launch

    wanted = [("bf16", 32, 64, 0), ("bf16", 32, 32, 64), ("bf16", 16, 20, 40)]
    for dtype, num_heads, num_pairs, num_rest in wanted:
        launch = rope_launch(num_heads, num_pairs, warp_lanes)
        kind = "even" if num_pairs % 16 == 0 else "odd"
        strides = [
            f"{name}_{axis}_stride"
            for name, axes in (("x", ("batch", "head", "token")), ("cos", ("batch", "token")))
            for axis in axes
        ]
        strides += [name.replace("x_", "result_") for name in strides if name.startswith("x_")]
        strides += [name.replace("cos_", "sin_") for name in strides if name.startswith("cos_")]
        for order in ("halves", "interleaved") if kind == "even" and not num_rest else ("halves",):
            yield Configuration(
                name=f"rope-{order}-{dtype}-{launch.block}x{num_pairs}-{'part' if num_rest else 'whole'}-{kind}",
                kernel="rope_kernel",
                signature={
                    **dict.fromkeys(("x_ptr", "result_ptr"), f"*{dtype}"),
                    **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
                    **dict.fromkeys(("num_heads", "num_tokens", "num_pairs", "num_columns", "num_head_blocks"), "i32"),
                    **dict.fromkeys(strides, "i32"),
                    "sin_sign": "fp32",
                },
                constants={
                    **{f"{name}_column_stride": 1 for name in ("x", "cos", "sin", "result")},
                    "INTERLEAVED": order == "interleaved",
                    "COPIES_REST": num_rest > 0,
                    "INTERPRETED": False,
                    "HEADS": launch.block,
                    "PAIRS": 1 << (num_pairs - 1).bit_length(),
                    "REST": 1 << max(0, num_rest - 1).bit_length(),
                },
                aligned=(
                    *("x_ptr", "cos_ptr", "sin_ptr", "result_ptr"),
                    *((*strides, "num_pairs", "num_columns") if kind == "even" else ()),
                ),
                num_warps=launch.num_warps,
            )


def dropout_configurations(warp_lanes: int) -> Iterator[Configuration]:
    """Of dropout: contiguous tensors, and rows of others."""
    from memwall.triton_kernels._configs import dropout_launch

    launch = dropout_launch(warp_lanes)
    pointers, strides = ("x_ptr", "residual_ptr", "result_ptr"), ("x_row_stride", "residual_row_stride")
    wanted = (("bf16", True, "flat"), ("fp32", True, "flat"), ("bf16", True, "rows"))
    for dtype, adds, layout in wanted:
        yield Configuration(
            name=f"dropout-{'add' if adds else 'plain'}-{dtype}-{launch.block}-{layout}-even",
            kernel="dropout_kernel",
            signature={
                **dict.fromkeys(pointers, f"*{dtype}"),
                "seed_ptr": "*i64",
                **dict.fromkeys(("num_elements", "num_columns", *strides, "threshold", "site"), "i32"),
                "scale": "fp32",
            },
            constants={
                "x_column_stride": 1,
                "residual_column_stride": 1,
                "ADDS": adds,
                "IS_FLAT": layout == "flat",
                "INTERPRETED": False,
                "BLOCK": launch.block,
            },
            aligned=(*pointers, *strides, "num_elements", "num_columns"),
            num_warps=launch.num_warps,
            fuses=False,
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
