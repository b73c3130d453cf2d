"""Every kernel compiled for every architecture, without a GPU: registers, spills, shared memory and 16-byte loads.

budgets.toml holds what each configuration may use; one without a line there fails. `python test_ahead_of_time.py`
prints what is used now, in the file's format.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BUDGETS = Path(__file__).with_name("budgets.toml")
# Shared memory that one program may have, bytes: the data sheets' figure per block.
TARGETS: dict[str, tuple[str, Any, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}
VOCABULARIES = (250, 500, 1000, 2000, 32_000, 50_257, 128_256, 262_144)

pytestmark = [pytest.mark.requires("triton"), pytest.mark.slow, pytest.mark.timeout(300)]


class Usage(NamedTuple):
    """What one compiled kernel uses."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int
    """16 bytes by one lane in one instruction."""


class Configuration(NamedTuple):
    """One way a kernel is launched."""

    name: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    """Parameters that the launcher guarantees to be divisible by 16."""
    num_warps: int


def configurations(warp_lanes: int) -> Iterator[Configuration]:
    """All that _configs.py can give, over the dtypes, each once."""
    parts = (loss_configurations(warp_lanes), glu_configurations(warp_lanes), norm_configurations(warp_lanes))
    yield from {configuration.name: configuration for part in parts for configuration in part}.values()


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


def kernel_named(name: str) -> Any:
    """The kernel of that name in any of the package's modules."""
    from memwall import triton_kernels

    for path in Path(triton_kernels.__file__).parent.glob("_*_kernel.py"):
        module = importlib.import_module(f"memwall.triton_kernels.{path.stem}")
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(name)


def compile_for(target_name: str, configuration: Configuration) -> Usage:
    """Compiles, and reads what the assembler reports."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp_lanes, _ = TARGETS[target_name]
    kernel = kernel_named(configuration.kernel)
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in configuration.constants else configuration.signature[name] for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in configuration.aligned if name in names}
    constants = {name: value for name, value in configuration.constants.items() if name in names}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": configuration.num_warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp_lanes), options=options)
    shared_bytes = int(compiled.metadata.shared)
    return _usage_of_cubin(compiled, shared_bytes) if backend == "cuda" else _usage_of_gcn(compiled, shared_bytes)


def _usage_of_cubin(compiled: Any, shared_bytes: int) -> Usage:
    import triton.backends.nvidia as nvidia

    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", report).group(1)) for name in ("REG", "STACK"))  # type: ignore[union-attr]
    wide_loads = len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", compiled.asm["ptx"]))
    return Usage(registers, stack, shared_bytes, wide_loads)


def _usage_of_gcn(compiled: Any, shared_bytes: int) -> Usage:
    text = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))  # type: ignore[union-attr]

    spilled = 4 * (figure("vgpr_spill_count") + figure("sgpr_spill_count")) + figure("private_segment_fixed_size")
    return Usage(figure("vgpr_count"), spilled, shared_bytes, len(re.findall(r"(?:global|buffer)_load_dwordx4", text)))


@pytest.fixture
def compiled_not_interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        pytest.fail("TRITON_INTERPRET is set: kernels of this process cannot be compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_every_launch_is_compiled() -> None:
    from memwall.triton_kernels._configs import row_loss_launch

    possible = {row_loss_launch(vocabulary, 32) for vocabulary in range(1, 10_000)}
    assert possible == {row_loss_launch(vocabulary, 32) for vocabulary in VOCABULARIES}


@pytest.mark.parametrize("target", TARGETS)
def test_within_budget(target: str, compiled_not_interpreted: None) -> None:
    budgets = tomllib.loads(BUDGETS.read_text())[target]
    limit_bytes = TARGETS[target][3]
    found = {c.name: compile_for(target, c) for c in configurations(TARGETS[target][2])}
    assert found.keys() == budgets.keys()
    wrong = {
        name: (usage, budget)
        for name, usage in found.items()
        if (budget := Usage(**budgets[name])) is not None
        and not (
            usage.registers <= budget.registers
            and usage.spilled_bytes == budget.spilled_bytes == 0
            and usage.shared_bytes <= min(budget.shared_bytes, limit_bytes)
            and usage.wide_loads >= budget.wide_loads
        )
    }
    assert wrong == {}


def test_alignment_is_what_makes_loads_wide(compiled_not_interpreted: None) -> None:
    """The gate can fail: without what the launcher guarantees there is not one 16-byte load."""
    first = next(iter(configurations(32)))
    assert compile_for("sm_90", first).wide_loads > 0
    assert compile_for("sm_90", first._replace(aligned=())).wide_loads == 0


def test_a_vocabulary_of_one_compiles(compiled_not_interpreted: None) -> None:
    """Triton passes an integer of 1 as a constant."""
    first = next(iter(configurations(32)))
    signature = {name: kind for name, kind in first.signature.items() if name != "vocabulary"}
    constants = {**first.constants, "vocabulary": 1}
    assert compile_for("sm_90", first._replace(signature=signature, constants=constants)).spilled_bytes == 0


def main() -> None:
    """Prints budgets.toml; registers rounded up, so that a compiler's small changes pass."""
    for target in TARGETS:
        print(f"[{target}]")
        for configuration in configurations(TARGETS[target][2]):
            usage = compile_for(target, configuration)
            budget = usage._replace(registers=-(-usage.registers // 16) * 16)._asdict()
            print(f"{configuration.name} = {{ {', '.join(f'{key} = {value}' for key, value in budget.items())} }}")
        print()


if __name__ == "__main__":
    sys.exit(main())
