"""Run by test_interpreter.py, with TRITON_INTERPRET=1: kernels of `glu` that are wrong in one place must be caught."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memwall.triton_kernels import geglu, swiglu
from memwall.triton_kernels.glu import _kernel as kernel_module

SOURCE = Path(kernel_module.__file__)
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh")}


def check(operation: Any, kind: str) -> None:
    torch.manual_seed(0)
    ours = {
        "silu": swiglu,
        "gelu": geglu,
        "gelu_tanh": lambda gate, up: geglu(gate, up, approximate="tanh"),
    }[kind]
    operation(ours, lambda gate, up: ACTIVATIONS[kind](gate) * up).check(*torch.randn(2, 5, 3000))


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("silu", "tl.abs(x) * -1.4426950408889634", "x * -1.4426950408889634"),
        ("silu", "slope = share * rest\n    elif", "slope = share * share\n    elif"),
        ("silu", "grad_up_ptr + results, grad * (gate", "grad_up_ptr + results, (gate"),
        ("silu", "grad_gate = grad * up * (share + gate", "grad_gate = grad * up * (share - gate"),
        ("gelu", "0.5 * (1.0 + tl.erf", "0.5 * (1.0 - tl.erf"),
        ("gelu", "gate * gate * -0.7213475204444817", "gate * gate * 0.7213475204444817"),
        ("gelu_tanh", "(gate + 0.044715", "(gate - 0.044715"),
        ("gelu_tanh", "(1.0 + 3.0 * 0.044715", "(1.0 - 3.0 * 0.044715"),
        ("silu", "mask = columns < num_columns\n    gate_ptrs", "mask = columns < num_columns - 1\n    gate_ptrs"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(
    operation: Any,
    mutant: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    old: str,
    new: str,
    poisoned: None,
) -> None:
    check(operation, kind)
    wrong = mutant(SOURCE, old, new)
    for name in ("launch_glu", "launch_glu_backward"):
        monkeypatch.setattr(kernel_module, name, getattr(wrong, name))
    with pytest.raises(AssertionError):
        check(operation, kind)


def test_a_kernel_that_writes_its_input_is_caught(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(SOURCE, "store_rounded(product_ptr + row * product_row_stride", "store_rounded(gate_ptr + row * 0")
    gate, up = torch.randn(2, 5, 40)
    before = gate.clone()
    swiglu(gate, up)
    assert torch.equal(gate, before)
    monkeypatch.setattr(kernel_module, "launch_glu", wrong.launch_glu)
    swiglu(gate, up)
    assert not torch.equal(gate, before)


FAR_ROWS = """
import sys
import numpy as np, torch
import importlib.util
spec = importlib.util.spec_from_file_location("memwall.triton_kernels.glu._far", sys.argv[1])
module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
stride, columns = 1 << 30, 100
memory = np.memmap(sys.argv[2] + "/rows", dtype=np.float16, mode="w+", shape=(3 * stride + 4096,))
gate = torch.from_numpy(memory).as_strided((4, columns), (stride, 1))
gate.copy_(torch.arange(400.0).reshape(4, 100) % 7 - 3)
up = torch.ones(4, columns, dtype=torch.float16)
product, grad_gate, grad_up = torch.empty(4, columns), torch.empty(4, columns), torch.empty(4, columns)
module.launch_glu(gate, up, product, "silu")
assert torch.allclose(product, torch.nn.functional.silu(gate.float())), product
module.launch_glu_backward(gate, gate, up, grad_gate, grad_up, "silu")
assert torch.allclose(grad_up, gate.float() * product), grad_up
"""


@pytest.mark.parametrize(("narrow", "status"), [(True, -11), (False, 0)], ids=["int32", "int64"])
def test_rows_beyond_two_to_the_31_elements(tmp_path: Path, narrow: bool, status: int) -> None:
    """A sparse file of 6 GiB; the same kernel with 32-bit program ids dies."""
    text = SOURCE.read_text()
    assert text.count("tl.program_id(0).to(tl.int64)") == 2
    path = tmp_path / "far.py"
    path.write_text(text.replace("tl.program_id(0).to(tl.int64)", "tl.program_id(0)") if narrow else text)
    command = [sys.executable, "-c", FAR_ROWS, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
