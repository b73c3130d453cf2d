"""`memwall estimate`: the worst batch of a data set, and every phase of a run."""

from pathlib import Path

import jsonschema
import pytest
from forecasts import FACTORY, LLAMA, OUTLIER, SCHEMA, Run, estimated

from memwall.cli.app import main

pytestmark = pytest.mark.slow


@pytest.mark.requires("transformers")
def test_an_outlier_of_the_data_decides_the_forecast(run: Run, config: str, data: str) -> None:
    """The forecast is that of its length, and says which sample it is and when it comes."""
    common = ("estimate", config, "--device", "h100-80gb", "--batch", "4", "--dtype", "bfloat16")
    _, found = run(*common, "--worst-batch", "dataset", "--data", data)
    jsonschema.validate(found, SCHEMA)
    choice = found["worst_batch"]
    assert (choice["rule"], choice["num_samples"], choice["padded_length"]) == ("dataset", 4, OUTLIER)
    assert (choice["longest_sample"], choice["longest_step"]) == (199, 50)
    _, same = run(*common, "--seq", str(OUTLIER))
    # Padded to it, the other samples need a mask, and with it another attention kernel and more memory.
    assert found["peak"]["allocated_bytes"] > same["peak"]["allocated_bytes"]
    assert same["worst_batch"] is None
    _, usual = run(*common, "--worst-batch", "p99", "--data", data)
    assert (usual["worst_batch"]["padded_length"], usual["worst_batch"]["num_longer_batches"]) == (163, 1)
    assert usual["peak"]["process_bytes"] < found["peak"]["process_bytes"]
    assert any(line.startswith("1 of 100 batches, which are longer") for line in usual["not_modelled"])
    _, longest = run(*common, "--worst-batch", "max-length")
    assert longest["worst_batch"]["padded_length"] == LLAMA["max_position_embeddings"]


@pytest.mark.requires("transformers")
def test_the_table_names_the_worst_batch(capsys: pytest.CaptureFixture[str], config: str, data: str) -> None:
    common = ("estimate", config, "--device", "h100-80gb", "--batch", "4", "--dtype", "bfloat16")
    for options, expected in (
        (("dataset", "--data", data), "4 x 1500 tokens: the longest of 100 batches"),
        (("p99", "--data", data), "1.0% are longer, the longest by sample 199, 1500 tokens, in step 50 as read"),
        (("dataset", "--data", data, "--seq", "200"), "in step 50 as read; 1 longer sample taken as cut"),
        (("max-length",), "4 x 2048 tokens: every sample as long as allowed"),
    ):
        main([*common, "--worst-batch", *options])
        shown = capsys.readouterr().out
        # The path of the data is folded wherever the column ends.
        assert "".join(expected.split()) in "".join(shown.split())


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("longest",), "--worst-batch: 'longest' is not known; expected one of max-length, dataset, p99"),
        (("dataset",), "--worst-batch dataset needs --data FILE: a .jsonl file whose objects have 'input_ids'"),
        (("max-length", "--data", "d"), "--data d: say which batch of it to forecast: --worst-batch dataset, or p99"),
        (("p99", "--data", "missing"), "cannot read missing: No such file or directory; expected a .jsonl"),
    ],
)
def test_a_batch_that_cannot_be_found_is_one_clear_error(
    options: tuple[str, ...], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (("estimate",), ("plan", "--budget", "50%")):
        assert main([*command, config, "--device", "l4", "--worst-batch", *options]) == 2
        assert message in capsys.readouterr().err
