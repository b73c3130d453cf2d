"""Moments in 8 bits are committed as the codes that they are: what goes on from them, and what reads them opened."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import NUM_STEPS, Make, Script, adamw, run
from optimizer_runs import OPTIMIZERS, are_equal, same
from plans import RESUMABLE, plan_of, resumable_model

from memwall.apply.optimizer_state import low_bit_form
from memwall.apply.optimizer_state.low_bit import LowBitMoments, LowBitOptimizerState
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.checkpoint.files import export_torch, read_summary
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.predict.low_bit_moments import can_be_low_bit, low_bit_bytes

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread"), pytest.mark.requires("torchao")]

WIDTH = 1024
"""Both matrices that are trained have moments in 8 bits then, of 8 and of 4 thousand elements."""
CHANGE_IN = 3


class LowBit(Script):
    """Its moments are in 8 bits in some of its iterations, from their beginning on, as under a plan."""

    def __init__(self, make: Make = adamw, *, low: range = range(NUM_STEPS), stop_in: int | None = None) -> None:
        super().__init__(make, stop_in=stop_in, width=WIDTH)
        self.low, self.state = low, None
        given = self.numbers
        self.numbers = lambda: self._changing(given())

    def _changing(self, steps: Iterator[int]) -> Iterator[int]:
        for step in steps:
            if step in self.low and self.state is None:
                self.state = LowBitOptimizerState(LowBitMoments(self.optimizer))
            elif step not in self.low and self.state is not None:
                self.state.undo()
                self.state = None
            yield step


def plain(make: Make = adamw, stop_in: int | None = None) -> Script:
    return LowBit(make, low=range(0), stop_in=stop_in)


# What goes on.


@pytest.mark.parametrize("name", ["adamw for-loop", "adamw fused", "adam amsgrad"])
def test_interrupted_and_resumed_is_equal_to_uninterrupted(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    whole = run(lambda: LowBit(make))
    for step in (1, CHANGE_IN, CHANGE_IN + 1):
        run(lambda step=step: LowBit(make, stop_in=step), StepCheckpoint(tmp_path, is_resuming=True))
    checkpoint = StepCheckpoint(tmp_path, is_resuming=True)
    assert checkpoint.resumed_steps == CHANGE_IN + 1
    resumed = run(lambda: LowBit(make), checkpoint)
    assert resumed.state.moments.num_closed == whole.state.moments.num_closed >= 4
    assert are_equal(whole.result, resumed.result)
    first, second = ([list(state) for state in one.optimizer.state.values()] for one in (whole, resumed))
    assert first == second


def test_state_in_float32_is_closed_as_the_same_process_would_have_closed_it(tmp_path: Path) -> None:
    whole = run(lambda: LowBit(low=range(CHANGE_IN, NUM_STEPS)))
    run(lambda: plain(stop_in=CHANGE_IN), StepCheckpoint(tmp_path))
    assert are_equal(whole.result, run(LowBit, StepCheckpoint(tmp_path, is_resuming=True)).result)


class OnDisk(LowBit):
    """Its moments are on disk instead."""

    def __init__(self) -> None:
        super().__init__(low=range(0))

    def train(self) -> None:
        state, close = open_optimizer_state(
            self.optimizer, disk=None, capacity_bytes=None, resident_bytes=0, bucket_bytes=4096, min_bytes=64
        )
        try:
            super().train()
        finally:
            assert state.bytes_written > 0
            close()


@pytest.mark.parametrize("script", [plain, OnDisk], ids=["memory", "disk"])
def test_where_they_are_not_kept_in_8_bits_they_are_opened_as_the_same_process_would_have_opened_them(
    tmp_path: Path, script: Any
) -> None:
    whole = run(lambda: LowBit(low=range(CHANGE_IN)))
    run(lambda: LowBit(stop_in=CHANGE_IN), StepCheckpoint(tmp_path))
    resumed = run(script, StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(whole.result, resumed.result)
    assert not are_equal(run(LowBit).result, resumed.result)


def test_torchaos_own_optimizer_goes_on_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    whole = run(lambda: plain(AdamW8bit))
    run(lambda: plain(AdamW8bit, stop_in=CHANGE_IN), StepCheckpoint(tmp_path))
    resumed = run(lambda: plain(AdamW8bit), StepCheckpoint(tmp_path, is_resuming=True))
    for parameter, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(parameter, other)
        moments, others = (one.optimizer.state.get(p, {}) for one, p in ((whole, parameter), (resumed, other)))
        for key, value in moments.items():
            assert (
                low_bit_form.is_low_bit(value)
                == low_bit_form.is_low_bit(others[key])
                == (key != "step" and can_be_low_bit(parameter.numel()))
            )
            if low_bit_form.is_low_bit(value):
                assert same(low_bit_form.pieces_of(key, value), low_bit_form.pieces_of(key, others[key]))


# What is on disk, and what reads it.


def test_a_commit_holds_codes_scales_and_tables(tmp_path: Path) -> None:
    script = run(LowBit, StepCheckpoint(tmp_path))
    num_bytes = sum(
        4 + 2 * (low_bit_bytes(p.numel()) if can_be_low_bit(p.numel()) else p.nbytes) for p in script.optimizer.state
    )
    assert read_summary(tmp_path).state_bytes == num_bytes


def test_a_file_of_torch_holds_them_in_float32_and_is_made_without_torchao(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run(LowBit, StepCheckpoint(tmp_path / "run"))
    monkeypatch.setattr(low_bit_form, "find_spec", lambda _: None)
    export_torch(tmp_path / "run", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"]
    assert same(found["state"], script.optimizer.state_dict()["state"])
    other = plain()
    other.optimizer.load_state_dict(found)
    assert same(other.optimizer.state_dict()["state"], found["state"])


@pytest.mark.parametrize("num_elements", [4096, (128 << 10) + 256, 3 * (128 << 10)])
def test_opened_they_are_what_torchao_makes_of_them(num_elements: int) -> None:
    moments = LowBitMoments(adamw([torch.zeros(num_elements)]))
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    moment = moments.new(values, "exp_avg")
    moments.write(moment, 0, num_elements, values)
    assert torch.equal(low_bit_form.opened(moment.codes, moment.scale, moment.qmap), moment.dequantize())


# A process that is killed.


def test_a_command_killed_after_any_step_ends_with_the_same_weights_and_moments(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(plan_of(resumable_model(), LowBitState(), micro_batch=32).encode())

    def begin(out: str, *options: str) -> subprocess.Popen[bytes]:
        memwall = [sys.executable, "-m", "memwall", "run", "--plan", str(tmp_path / "plan.json")]
        command = [*memwall, "--allow", "low-bit-optimizer", *options, str(RESUMABLE), "--steps", "12", "--out", out]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)

    resumed = ("--checkpoint", str(tmp_path / "run"), "--resume")
    for num_steps in (3, 2):
        process = begin("killed.txt", *resumed)
        assert process.stdout is not None
        for _ in range(num_steps):
            assert process.stdout.readline().startswith(b"step ")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert read_summary(tmp_path / "run").step >= 2
    for out, options in (("killed.txt", resumed), ("plain.txt", ())):
        process = begin(out, *options)
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
    assert (tmp_path / "killed.txt").read_text() == (tmp_path / "plain.txt").read_text()
