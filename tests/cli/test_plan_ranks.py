"""`memwall plan --ranks`: how to divide a model among devices, as a user meets it."""

from pathlib import Path

import jsonschema
import pytest
from figures import untagged, without_unit
from forecasts import SCHEMA, Run

from memwall.cli.app import main
from memwall.planning.planfile import Plan

# 537 million parameters: 8 GiB of weights, gradients and state in float32, and nearly no activations.
FACTORY = """
import torch
from memwall.trace.workload import Workload

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4096, 8192), torch.nn.Linear(8192, 4096)

    def forward(self, values):
        return values + self.down(torch.relu(self.up(values)))

def large():
    return Workload(
        model=lambda: torch.nn.Sequential(*(Block() for _ in range(8))),
        batch=lambda: torch.ones(64, 4096),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "large.py").write_text(FACTORY)
    return f"{tmp_path / 'large.py'}:large"


@pytest.mark.slow
def test_what_divides_a_model_is_the_fastest_way_that_fits(
    run: Run, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN less than one device needs THEN a way that divides it, every other one with its reason, and the curve."""
    output = tmp_path / "plan.json"
    asked = ("plan", spec, "--device", "a100-40gb", "--ranks", "16", "--link", "infiniband-hdr", "--host", "64GiB")
    status, found = run(*asked, "--budget", "8GiB", "--global-batch", "1024", "-o", str(output))
    jsonschema.validate(found, SCHEMA)
    assert (without_unit(found), untagged(found), status) == ([], [], 0)
    ranks = found["ranks"]
    choices = {one["words"]: one for one in ranks["choices"]}
    best = next(one for one in ranks["choices"] if not one["reason"])
    assert best["sharding"] == ranks["chosen"]
    assert not choices["DDP"]["fits"]
    assert "needs" in choices["DDP"]["reason"]
    fitting = [one for one in ranks["choices"] if one["fits"]]
    assert best["step_seconds"] <= 1.02 * min(one["step_seconds"] for one in fitting)
    assert best["step_seconds"] == pytest.approx(found["step_seconds"])
    assert all(one["process_bytes"] + one["margin_bytes"] <= 8 << 30 for one in fitting)
    assert ranks["units"] == [str(number) for number in range(8)]
    points = {point["num_ranks"]: point for point in ranks["curve"]}
    assert list(points) == [1, 2, 4, 8, 16, 64, 512]
    assert points[512]["process_bytes"] <= points[16]["process_bytes"] <= points[4]["process_bytes"]
    assert points[512]["samples_per_second"] > points[16]["samples_per_second"]
    assert Plan.load(output).forecast.ranks is not None
    now, more = ranks["peak"]
    assert (now["num_ranks"], more["num_ranks"]) == (16, 24)
    assert sum(value for name, value in now.items() if name.endswith("_bytes")) == found["peak"]["process_bytes"]
    assert best["sharding"]["is_hybrid"]
    assert now | {"num_ranks": 24} == more  # a node has all of the model
    assert main(["explain", str(output)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "16 ranks on 2 nodes over infiniband-hdr" in told
    assert "not chosen, since" in told
    assert "What a rank holds at the peak of its step (simulated) 16 ranks 24 ranks" in told


@pytest.mark.slow
def test_what_no_way_fits_is_said_with_the_least(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", spec, "--device", "a100-40gb", "--budget", "2GiB", "--ranks", "2"]
    assert main([*asked, "--global-batch", "100"]) == 2
    assert "2 ranks with the recorded batch of 64 each take 128 samples" in " ".join(capsys.readouterr().err.split())
    assert main(asked) == 3
    told = " ".join(capsys.readouterr().err.split())
    assert "no way to divide the model among 2 ranks fits 2.00 GiB on each" in told
    assert "it needs host memory: --host SIZE" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--link", "dgx-h100"), "--link: only together with --ranks N"),
        (("--ranks", "8"), "--ranks 8: only with a device of the table"),
        (("--ranks", "8", "--device", "h100-80gb", "--eval-batch", "4"), "--eval-batch 4: not together with --ranks"),
        (
            ("--ranks", "8", "--device", "h100-80gb", "--disk", "/tmp"),
            "of several ranks nothing is planned to be on",
        ),
    ],
)
def test_what_ranks_go_with(options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "some:thing", "--budget", "1GiB", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
