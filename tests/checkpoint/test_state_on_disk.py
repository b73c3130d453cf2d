"""The optimizer's state on disk is committed from where it lies, and resumed bucket by bucket to the same bits."""

from pathlib import Path

import pytest
from checkpoint_runs import Counting, Script, run
from optimizer_runs import OPTIMIZERS, are_equal

from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.checkpoint.step_checkpoint import StepCheckpoint

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


class OnDisk(Script):
    """Its optimizer's moments are on disk from the first forward on, as under a plan."""

    bytes_written = 0

    def train(self) -> None:
        state, close = open_optimizer_state(
            self.optimizer, disk=None, capacity_bytes=None, resident_bytes=100, bucket_bytes=256, min_bytes=64
        )
        try:
            super().train()
        finally:
            self.bytes_written = state.bytes_written
            self.num_away = len(state.buckets)
            close()


@pytest.mark.parametrize("name", ["adamw for-loop", "adamw fused", "adam amsgrad", "sgd foreach nesterov"])
def test_state_on_disk_is_committed_where_it_is_and_read_back_bucket_by_bucket(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    plain = run(lambda: Script(make))
    first = run(lambda: OnDisk(make, stop_in=2), StepCheckpoint(tmp_path))
    assert first.num_away > 1
    second = run(lambda: OnDisk(make, stop_in=4), StepCheckpoint(tmp_path, is_resuming=True))
    assert second.num_away > 1
    assert are_equal(plain.result, run(lambda: Script(make), StepCheckpoint(tmp_path, is_resuming=True)).result)


def test_a_run_can_go_over_from_memory_to_disk(tmp_path: Path) -> None:
    plain = run(Script)
    run(lambda: Script(stop_in=3), StepCheckpoint(tmp_path))
    resumed = run(OnDisk, StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)
    assert list(plain.result[1]["state"]) == list(resumed.result[1]["state"])


def test_state_on_disk_is_written_once_per_step_not_twice(tmp_path: Path) -> None:
    def large(stop_in: int) -> Script:
        return OnDisk(stop_in=stop_in, width=256)

    few, many = Counting(), Counting()
    run(lambda: large(2), StepCheckpoint(tmp_path / "few", backend=few))
    script = run(lambda: large(5), StepCheckpoint(tmp_path / "many", backend=many))
    parameters = [p for p in script.model.parameters() if p.requires_grad]
    weight_bytes = sum(p.nbytes for p in parameters)
    per_step = (many.num_bytes - few.num_bytes) / 3
    # Weights and two moments, and less than half of one of them for buffers, tables and padding.
    assert 3 * weight_bytes < per_step < 3.5 * weight_bytes + (64 << 10)
