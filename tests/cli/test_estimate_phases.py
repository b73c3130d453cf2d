"""`memwall estimate`: every phase of a run."""

from pathlib import Path

import pytest
from forecasts import FACTORY, LLAMA, Run, estimated

pytestmark = pytest.mark.slow


@pytest.mark.requires("transformers")
def test_evaluation_saving_and_resuming_have_peaks_of_their_own(run: Run, config: str) -> None:
    _, found = estimated(run, config)
    phases, host = found["phases"], found["host"]
    held = {name: phases[name]["allocated_bytes"] for name in phases}
    assert held["build"] < held["resume"] <= held["save"] < held["eval"] < held["steady_step"]
    assert found["peak"]["allocated_bytes"] == max(held.values())
    assert phases["save"]["host_bytes"] - phases["steady_step"]["host_bytes"] == host["weights_bytes"]
    assert phases["resume"]["host_bytes"] == host["process_bytes"][0] + host["state_bytes"]
    assert found["peak"]["host_bytes"] == max(phase["host_bytes"] for phase in phases.values())
    assert phases["save"]["disk_bytes"] == host["weights_bytes"] + host["state_bytes"]
    order = ("build", "first_step", "steady_step", "eval", "save", "resume")
    reached = [name for name in order if phases[name]["reserved_bytes"] == found["peak"]["reserved_bytes"]]
    assert found["peak_phase"] == reached[0]
    assert not any("evaluation, saving and resuming" in line for line in found["not_modelled"])


@pytest.mark.requires("transformers")
def test_a_large_batch_in_evaluation_can_be_what_does_not_fit(run: Run, config: str) -> None:
    _, plain = estimated(run, config)
    budget = str(plain["peak"]["process_bytes"])
    assert estimated(run, config, "--budget", budget)[0] == 4
    status, found = estimated(run, config, "--budget", budget, "--eval-batch", "64")
    assert (status, found["peak_phase"]) == (3, "eval")
    assert found["phases"]["steady_step"] == plain["phases"]["steady_step"]
    assert found["relaxations"][0] == "a smaller batch in evaluation: --eval-batch N"


@pytest.mark.requires("transformers")
def test_accumulation_keeps_gradients_and_the_batches_of_all_micro_batches(run: Run, config: str) -> None:
    (_, one), (_, two), (_, four) = (estimated(run, config, "--accumulate", str(n)) for n in (1, 2, 4))
    inputs = 3 * 4 * 1024 * 8  # tokens, mask and labels
    assert [found["waiting_batch_bytes"] for found in (one, two, four)] == [0, inputs, 3 * inputs]
    steady = [found["phases"]["steady_step"]["allocated_bytes"] for found in (one, two, four)]
    assert steady[1] > steady[0]
    assert steady[2] - steady[1] == 2 * inputs
    assert four["num_micro_batches"] == 4
    assert four["attention_kernels"] == {"cudnn": 4 * LLAMA["num_hidden_layers"]}
    # The optimizer runs once, everything else four times.
    assert 2 * two["step_seconds"] > four["step_seconds"] > 1.5 * two["step_seconds"]
    assert one["step_seconds"] < two["step_seconds"] < 2 * one["step_seconds"]


def test_a_model_that_cannot_be_evaluated_is_estimated_without(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(
        FACTORY.replace("model(batch).sum()", "model(batch).sum() if model.training else model(batch.missing)")
    )
    _, found = run("estimate", f"{path}:small", "--device", "l4")
    assert "eval" not in found["phases"]
    assert any("has no attribute 'missing'" in line for line in found["not_modelled"])
