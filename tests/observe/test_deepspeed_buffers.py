"""DeepSpeed's buffers cost what a configuration alone says: keys that are there, defaults, and "auto"."""

import json
from pathlib import Path
from typing import Any

import pytest

from memwall.cli.app import main
from memwall.errors import UsageError
from memwall.observe.deepspeed_buffers import buffers_in


@pytest.fixture
def bytes_of(tmp_path: Path) -> Any:
    def found(config: dict[str, Any]) -> dict[str, int | None]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        return {one.key.removeprefix("zero_optimization."): one.nbytes for one in buffers_in(path)}

    return found


def test_defaults_cost_gigabytes_whatever_the_model(bytes_of: Any) -> None:
    """GIVEN no sizes THEN buckets are DeepSpeed's own 5e8 elements: of half precision, or two of float32 to overlap."""
    assert bytes_of({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}) == {
        "reduce_bucket_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": 100_000_000,
        "stage3_max_live_parameters": 2_000_000_000,
    }
    overlapped = bytes_of({"zero_optimization": {"stage": 2, "overlap_comm": True}})
    assert overlapped == {"reduce_bucket_size": 4_000_000_000, "allgather_bucket_size": 2_000_000_000}
    assert bytes_of({"zero_optimization": {"stage": 0}}) == {}
    apart = bytes_of({"zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": False}})
    assert apart == {"allgather_bucket_size": 2_000_000_000}


def test_numbers_may_be_floats_and_auto_is_nobodys_number(bytes_of: Any) -> None:
    nvme = {"device": "nvme", "buffer_count": 6, "buffer_size": 1e6}
    zero = {"stage": 3, "reduce_bucket_size": 1e6, "stage3_prefetch_bucket_size": "auto", "offload_param": nvme}
    found = bytes_of({"communication_data_type": "fp32", "fp16": {"enabled": True}, "zero_optimization": zero})
    assert found["reduce_bucket_size"] == 4_000_000
    assert found["stage3_prefetch_bucket_size"] is None
    assert found["offload_param.buffer_size"] == 6 * 1_000_000 * 2
    swapped = {"offload_param": nvme | {"buffer_count": "auto"}, "offload_optimizer": {"device": "nvme"}}
    found = bytes_of({"zero_optimization": zero | swapped})
    assert found["offload_param.buffer_size"] is found["offload_optimizer.buffer_count"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "expected a DeepSpeed configuration in JSON"),
        ("{}", "has no section zero_optimization"),
        ('{"zero_optimization": {"stage": 4}}', "stage is 4; expected 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": true}}', "stage is True; expected 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 1, "reduce_bucket_size": "5e8"}}', "is '5e8'; expected a number of elements"),
        ('{"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}}', "is -1; expected a number of elements"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        buffers_in(tmp_path / "ds.json")


def test_doctor_names_each_key_with_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "reduce_bucket_size": 262144}}')
    assert main(["doctor", str(tmp_path / "ds.json")]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "zero_optimization.reduce_bucket_size: 1.0 MiB of each rank's device, for the whole run (262,144 elements)"
    )
    assert main(["doctor", "--json", str(tmp_path / "ds.json")]) == 0
    assert json.loads(capsys.readouterr().out)["buffers"][0]["nbytes"] == 1 << 20
