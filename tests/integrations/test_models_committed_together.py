"""Models that one optimizer steps are committed together: an encoder and its decoder."""

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from memwall.cli.app import main

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_encoder_decoder.py"


def digits_of(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.slow
def test_an_encoder_and_its_decoder_go_on_from_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a run of three modules that ends in step 3 WHEN it is resumed, twice THEN each has the plain run's bits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", "plain.pt"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    kept = ["run", "--budget", "8GiB", "--checkpoint", "kept"]
    assert main([*kept, str(SCRIPT), "--out", "kept.pt", "--stop-in", "3"]) == 9
    for _ in ("resumed", "finished already"):
        gc.collect()  # what another process would not have
        assert main([*kept, "--resume", str(SCRIPT), "--out", "kept.pt"]) == 0
        assert_close(digits_of(Path("kept.pt")), digits_of(Path("plain.pt")), rtol=0, atol=0)
