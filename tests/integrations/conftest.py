"""A small Llama with more activations than weights, data for it, digests of what it learned; configuration files."""

import hashlib
import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from warm_python import warm_python

from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings

SAMPLES, SEQUENCE = 16, 128


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    """Accelerate keeps precision and devices per process; tests want different ones."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other cost these tests more than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model() -> Callable[[], Any]:
    """The model, with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
    )

    def make() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    return make


@pytest.fixture(scope="session")
def samples() -> list[dict[str, Tensor]]:
    """Three batches of 16 samples of 128 tokens."""
    tokens = torch.randint(0, 128, (3 * SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


@pytest.fixture(scope="session")
def digest() -> Callable[[nn.Module], str]:
    """SHA-256 over all parameters."""

    def of(model: nn.Module) -> str:
        found = hashlib.sha256()
        for parameter in model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()

    return of


class Calls:
    """Counts calls in memory that a second run of a block does not put back, as it does lists that its hooks fill."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def note(self, *_: object) -> None:
        self._memory[0] += 1

    def __len__(self) -> int:
        return self._memory[0]


@pytest.fixture
def count_calls() -> Callable[[nn.Module], Calls]:
    """Counts the forwards of a module, those of a recomputation too."""

    def on(module: nn.Module) -> Calls:
        calls = Calls()
        module.register_forward_pre_hook(calls.note)
        return calls

    return on


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes a configuration into a folder of its own and returns the folder."""

    def write(config: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def budget_relative_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Makes sessions plan for a budget below a peak of their own trace: what a test process holds besides varies."""

    def set_to(peak: str, below: int) -> None:
        def relative(trace: Any, settings: Settings) -> Plan:
            # What a live run tells has room for the next recording as well, and for the first step.
            ample = make_plan(trace, msgspec.structs.replace(settings, first_step=None)).forecast
            peaks = {"plain": ample.plain_peak.process_bytes, "smallest": ample.smallest_feasible_budget_bytes}
            return make_plan(trace, msgspec.structs.replace(settings, budget_bytes=peaks[peak] - below))

        monkeypatch.setattr("memwall.session.first_plan.make_plan", relative)
        monkeypatch.setattr(
            "memwall.session.first_plan.found_by", lambda search: relative(search.trace, search.settings)
        )

    return set_to


# Runs a script as Python does and tells the process's peak, which a child cannot be asked for once it has ended.
_PLAIN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stderr.write(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


@pytest.fixture
def run_both_ways(tmp_path: Path) -> Callable[[Path], dict[str, Any]]:
    """Runs a script plainly, then with a budget below the plain peak; both must save the same weights.

    Returns:
        The report of the second run. Whether it kept the budget is not asked here (status 5: it did not).
    """

    def run(script: Path, *, below_plain: int) -> dict[str, Any]:
        plain, fitted, report = tmp_path / "plain.pt", tmp_path / "fitted.pt", tmp_path / "run.json"
        peak_kib = int(
            _python("-c", _PLAIN, str(script), "--out", str(plain), cwd=tmp_path).split("VmHWM:")[1].split()[0]
        )
        budget = str((peak_kib << 10) - below_plain)
        options = ("--budget", budget, "--report", str(report))
        _python("-m", "memwall", "run", *options, str(script), "--out", str(fitted), cwd=tmp_path, accepted=(0, 5))
        expected, found = torch.load(plain), torch.load(fitted)
        assert {name: _sha256(value) for name, value in found.items()} == {
            name: _sha256(value) for name, value in expected.items()
        }
        return json.loads(report.read_text())

    return run


def _python(*arguments: str, cwd: Path, accepted: tuple[int, ...] = (0,)) -> str:
    """Runs Python; returns what it wrote to standard error."""
    # What takes longer than the script itself.
    python = warm_python("transformers.trainer", "transformers.models.llama.modeling_llama")
    done = python.run(*arguments, folder=cwd, timeout_s=100)
    assert done.returncode in accepted, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
