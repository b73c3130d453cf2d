"""`memwall estimate` of models whose steps depend on values, which fake tensors have not."""

from pathlib import Path

import pytest
from forecasts import FACTORY, Run

from memwall.cli.app import main
from memwall.trace.file import save_trace
from memwall.trace.spec import load_workload
from memwall.trace.trace_builder import record

ROUTED = """
import torch
from memwall.trace.workload import Workload

def loss(model, batch):
    scores = model(batch)
    return model(batch[scores[:, 0] > 0]).sum()

def routed():
    return Workload(
        model=lambda: torch.nn.Linear(256, 256),
        batch=lambda: torch.ones(4096, 256),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


COUNTING = """
import torch
from memwall.trace.workload import Workload

def loss(model, batch):
    scores = model(batch).flatten()
    return scores[: 1 + int((scores > 0).sum())].sum()

def counting(width=256):
    return Workload(
        model=lambda: torch.nn.Linear(width, width),
        batch=lambda: torch.ones(64, width),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )

def too_large():
    return counting(1 << 17)
"""


@pytest.mark.parametrize("command", [("estimate",), ("plan", "--budget", "50%")])
def test_a_step_that_needs_values_is_run_for_real_where_there_is_room(
    run: Run, tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a loss whose size hangs on values THEN a CPU's step is translated, and the forecast says so."""
    (tmp_path / "values.py").write_text(COUNTING)
    status, found = run(*command, f"{tmp_path / 'values.py'}:counting", "--device", "l4")
    assert (status, found["source"]) == (0, "recorded")
    assert any("those of the machine that recorded the trace" in line for line in found["not_modelled"])
    assert any(
        "evaluation: not on fake tensors: loss: an integer computed from weights" in n for n in found["not_modelled"]
    )
    if command == ("estimate",):
        assert found["peak"]["allocated_bytes"] >= 3 * 4 * 256 * 256
        main([*command, f"{tmp_path / 'values.py'}:counting", "--device", "l4", "-v"])
        assert "two real steps on this CPU, translated" in " ".join(capsys.readouterr().out.split())
    assert main([*command, f"{tmp_path / 'values.py'}:too_large", "--device", "l4"]) == 2
    assert "a real step is not tried here: with 64.00 GiB of weights" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("estimate",), ("plan", "--budget", "50%")])
def test_rows_selected_by_values_take_a_share(
    run: Run, tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "routing.py").write_text(ROUTED)
    asked = (*command, f"{tmp_path / 'routing.py'}:routed", "--device", "l4")
    assert main([*asked, "--json"]) == 2
    assert "mask_share" in capsys.readouterr().err
    (_, little), (_, much) = (run(*asked, "--mask-share", share) for share in ("0.25", "0.75"))
    assert little["peak"]["allocated_bytes"] < much["peak"]["allocated_bytes"]


def test_a_recorded_trace_has_no_share_of_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training.py").write_text(FACTORY)
    save_trace(record(load_workload(f"{tmp_path / 'training.py'}:small")), tmp_path / "t.trace")
    command = ["plan", f"{tmp_path / 't.trace'}", "--device", "l4", "--budget", "50%", "--mask-share", "0.5"]
    assert main(command) == 2
    assert "--mask-share: " in (shown := capsys.readouterr().err)
    assert "t.trace is a trace, in which that is recorded; leave it out" in shown
    command[-2:] = ["--autocast", "bfloat16", "--checkpointing"]
    assert main(command) == 2
    assert "--autocast, --checkpointing: " in capsys.readouterr().err
