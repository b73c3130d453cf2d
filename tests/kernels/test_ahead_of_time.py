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
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launch_configurations import VOCABULARIES, Configuration, configurations

BUDGETS = Path(__file__).with_name("budgets.toml")
# Shared memory that one program may have, bytes: the data sheets' figure per block.
TARGETS: dict[str, tuple[str, Any, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}

pytestmark = [pytest.mark.requires("triton"), pytest.mark.slow, pytest.mark.timeout(300)]


class Usage(NamedTuple):
    """What one compiled kernel uses."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int
    """16 bytes by one lane in one instruction."""


def kernel_named(name: str) -> Any:
    """The kernel of that name in any of the package's modules."""
    from memwall import triton_kernels

    root = Path(triton_kernels.__file__).parent
    for path in root.rglob("_*kernel.py"):
        parts = path.relative_to(root).with_suffix("").parts
        module = importlib.import_module(".".join((triton_kernels.__name__, *parts)))
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
    options = {"num_warps": configuration.num_warps, "enable_fp_fusion": configuration.fuses}
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
