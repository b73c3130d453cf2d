"""Models that are trained together are committed together: an encoder and its decoder, a GAN."""

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from memwall.cli.app import main

SCRIPTS = Path(__file__).parent.parent / "scripts"


def digits_of(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "num_steps", "stops"),
    [
        pytest.param("train_encoder_decoder.py", 6, (3,), id="three modules of one optimizer"),
        pytest.param("train_gan.py", 9, (1, 4), id="a generator and two critics, three optimizers"),
    ],
)
def test_models_go_on_from_the_same_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    num_steps: int,
    stops: tuple[int, ...],
) -> None:
    """GIVEN a run that ends in the midst of steps WHEN it is resumed, also once done THEN it has the plain run's bits.

    The generator is called without gradients first, its norm counts that, and a critic is stepped twice in a step.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "--out", "plain.pt"])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    kept = ["run", "--budget", "8GiB", "--checkpoint", "kept", "--resume", str(SCRIPTS / script), "--out", "kept.pt"]
    for stop in stops:
        gc.collect()  # what another process would not have
        assert main([*kept, "--stop-in", str(stop)]) == 9
    capsys.readouterr()
    for first in (stops[-1], num_steps):  # resumed; finished already
        gc.collect()
        assert main(kept) == 0
        assert f"step {first} was read and verified" in " ".join(capsys.readouterr().err.split())
        assert_close(digits_of(Path("kept.pt")), digits_of(Path("plain.pt")), rtol=0, atol=0)
