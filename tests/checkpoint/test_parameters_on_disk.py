"""Parameters on disk are committed from where they lie, and a run goes on from there to the same bits."""

import errno
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_runs import Counting, Interrupted
from optimizer_runs import are_equal
from plans import RESUMABLE, resumable_on_disk
from streamed_models import GPT, loss_of, put_on_disk
from torch import nn

import memwall
from memwall.apply.streaming.open_streaming import open_parameter_streaming
from memwall.checkpoint.files import export_safetensors, import_checkpoint
from memwall.checkpoint.resumption import set_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.errors import ApplyError, MemwallError, StoreError
from memwall.integrations.launcher import run_script
from memwall.session.session import Session
from memwall.store.backend import SystemBackend

pytestmark = [pytest.mark.leaves_changed, pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

NUM_STEPS = 6


class Trained(NamedTuple):
    """What a run has come to."""

    model: nn.Module
    state: Any
    """Of the optimizer."""


def trained(
    checkpoint: StepCheckpoint | None,
    *,
    is_streamed: bool,
    staying: tuple[str, ...] = (),
    stop_in: int | None = None,
) -> Trained | None:
    """A run as `memwall run --checkpoint` has it, with clipping, accumulation and weights that are touched in between;
    None where it was interrupted."""
    set_checkpoint(checkpoint)
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    closing = ExitStack()
    is_begun = False
    completed = False
    try:
        for step in memwall.steps(NUM_STEPS):
            if not is_begun:
                is_begun = True
                if is_streamed:
                    parameters, close = put_on_disk(model, optimizer)
                    closing.callback(close)
                    parameters.let_stay(staying)
                if checkpoint is not None:
                    checkpoint.attach(model)
            for micro in range(2):
                loss_of(model, 2 * step + micro).backward()
            if step == stop_in:
                raise Interrupted
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # the loop's own doing, after the step
                model.layers[0].up.weight.clamp_(-0.5, 0.5)
        completed = True
    except Interrupted:
        return None
    finally:
        try:
            if checkpoint is not None:
                checkpoint.finish(completed=completed)
            closing.close()
        finally:
            set_checkpoint(None)
            if checkpoint is not None:
                checkpoint.close(completed=False)
    if checkpoint is not None and checkpoint.failure is not None:
        raise checkpoint.failure
    return Trained(model, optimizer.state_dict())


@pytest.fixture(scope="module")
def plain() -> Trained:
    torch.set_num_threads(1)
    found = trained(None, is_streamed=False)
    assert found is not None
    return found


def test_an_interrupted_run_goes_on_with_them_on_disk_or_in_memory(tmp_path: Path, plain: Trained) -> None:
    """GIVEN a run interrupted on disk, resumed on disk and interrupted, then resumed in memory, and the other way."""
    for number, places in enumerate(((True, True, False), (False, True, True), (True, False, True))):
        directory = tmp_path / str(number)
        for is_streamed, stop_in in zip(places, (2, 4, None), strict=True):
            found = trained(
                StepCheckpoint(directory, is_resuming=stop_in != 2), is_streamed=is_streamed, stop_in=stop_in
            )
        assert found is not None
        assert are_equal(found, plain)


def test_parameters_that_stay_in_memory_are_committed_in_each_step_as_well(tmp_path: Path, plain: Trained) -> None:
    units = ("tokens", "positions", *(f"layers.{number}" for number in range(4)), "head")
    for staying, stop_in in ((units, 2), (units[:3], 4), (units, None)):
        found = trained(
            StepCheckpoint(tmp_path, is_resuming=stop_in != 2), is_streamed=True, staying=staying, stop_in=stop_in
        )
    assert found is not None
    assert are_equal(found, plain)


def test_a_commit_is_of_its_step_whatever_is_written_before_it_is_durable(tmp_path: Path) -> None:
    """GIVEN parameters that the loop writes to in each forward WHEN it is killed THEN the commit has those it had."""
    torch.manual_seed(0)
    model = GPT()
    checkpoint = StepCheckpoint(tmp_path)
    set_checkpoint(checkpoint)
    try:
        streaming, close = open_parameter_streaming(
            model, disk=None, capacity_bytes=None, window_bytes=1 << 12, min_bytes=1024
        )
        before = model.tokens.weight.detach().clone()
        parameters = streaming.stored()
        slots = {id(parameter): slot for parameter, slot, _ in parameters}
        checkpoint._journal.data.hold(list(slots.values()))
        checksums = dict(slots[id(model.tokens.weight)].checksums)
        with torch.no_grad():
            model.tokens.weight.add_(1.0)
        after = {id(parameter): slot for parameter, slot, _ in streaming.stored()}
        changed = [parameter for parameter, *_ in parameters if after[id(parameter)] is not slots[id(parameter)]]
        assert [id(parameter) for parameter in changed] == [id(model.tokens.weight)]
        assert slots[id(model.tokens.weight)].checksums == checksums
        assert after[id(model.tokens.weight)].offset != slots[id(model.tokens.weight)].offset
        assert torch.equal(model.tokens.weight.detach(), before + 1.0)
        close()
    finally:
        set_checkpoint(None)
        checkpoint.close(completed=False)


def test_what_is_on_disk_is_written_once_a_step(tmp_path: Path) -> None:
    """Parameters, two moments, and less than half of one of them for buffers, tables and padding."""
    counts = []
    for stop_in in (2, 5):
        backend = Counting()
        trained(StepCheckpoint(tmp_path / str(stop_in), backend=backend), is_streamed=True, stop_in=stop_in)
        counts.append(backend.num_bytes)
    weight_bytes = sum(parameter.nbytes for parameter in GPT().parameters())
    per_step = (counts[1] - counts[0]) / 3
    # The first layer's matrix is written twice: by the step, and after the loop has clamped it.
    assert 3 * weight_bytes < per_step < 3.6 * weight_bytes + (96 << 10)


def test_weights_are_exported_from_where_they_lie(tmp_path: Path, plain: Trained) -> None:
    from safetensors.torch import load_file

    trained(StepCheckpoint(tmp_path / "run"), is_streamed=True)
    assert export_safetensors(tmp_path / "run", tmp_path / "model.safetensors") == NUM_STEPS
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in plain.model.named_parameters())


def test_parameters_that_lie_elsewhere_are_not_left_out_without_a_word(tmp_path: Path) -> None:
    """GIVEN parameters on a scratch disk already WHEN they are to be committed THEN that is refused."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    _, close = open_parameter_streaming(model, disk=None, capacity_bytes=None, window_bytes=1 << 16, min_bytes=1024)
    try:
        with pytest.raises(ApplyError, match=r"parameter .* is neither in memory nor in .*open the checkpoint first"):
            import_checkpoint(tmp_path / "run", model, optimizer, step=3)
    finally:
        close()


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_parameter_is_found_when_the_run_is_resumed(tmp_path: Path, damage: str) -> None:
    trained(StepCheckpoint(tmp_path), is_streamed=True, stop_in=3)
    data = tmp_path / "data.bin"
    data = data if data.exists() else max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        for position in range(0, len(content), 4096):
            content[position + 7] ^= 1
    data.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged|cut short"):
        StepCheckpoint(tmp_path, is_resuming=True)


def test_a_full_disk_ends_the_run_and_the_last_step_is_still_there(tmp_path: Path, plain: Trained) -> None:
    class Full(Counting):
        """Has no room once so many bytes are written."""

        def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
            if self.num_bytes > (1 << 21):
                raise OSError(28, "No space left on device")
            super().reserve(fd, offset, num_bytes)

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if self.num_bytes > (1 << 21):
                raise OSError(28, "No space left on device")
            return super().pwrite(fd, data, offset)

    with pytest.raises(MemwallError, match="No space left"):
        trained(StepCheckpoint(tmp_path, backend=Full()), is_streamed=True)
    found = trained(StepCheckpoint(tmp_path, is_resuming=True), is_streamed=True)
    assert found is not None
    assert are_equal(found, plain)


def test_a_parameter_that_others_share_is_written_again_at_each_commit(tmp_path: Path) -> None:
    """GIVEN a loop that keeps a view of a weight WHEN it writes there after a commit THEN the next one has it."""
    model = GPT()
    checkpoint = StepCheckpoint(tmp_path)
    set_checkpoint(checkpoint)
    try:
        streaming, close = open_parameter_streaming(
            model, disk=None, capacity_bytes=None, window_bytes=1 << 12, min_bytes=1024
        )
        weight = model.layers[0].up.weight
        view, expected = weight.data, weight.detach().clone()
        found = []
        for _ in range(2):
            (slot,) = (slot for parameter, slot, _ in streaming.stored() if parameter is weight)
            found.append(dict(slot.checksums))
            view[0].fill_(7.0)
        assert found[0] != found[1]
        del view
        streaming.stored()
        expected[0].fill_(7.0)
        assert torch.equal(weight.detach(), expected)
        close()
    finally:
        set_checkpoint(None)
        checkpoint.close(completed=False)


def test_a_run_that_ends_while_its_parameters_go_to_disk_may_begin_again(tmp_path: Path) -> None:
    """GIVEN a disk that is full before the first step WHEN there is room THEN the directory is as good as new."""

    class Full(SystemBackend):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if len(data) > 4096:  # no commit record
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().pwrite(fd, data, offset)

    arguments = ["--steps", "2", "--out", str(tmp_path / "sha256.txt")]

    def train(backend: SystemBackend | None) -> int:
        checkpoint = StepCheckpoint(tmp_path / "run", backend=backend)
        session = Session(plan=resumable_on_disk(), disk=str(tmp_path))
        return run_script(str(RESUMABLE), arguments, session, checkpoint=checkpoint)

    with pytest.raises(MemwallError, match="No space left"):
        train(Full())
    assert train(None) == 0
    assert StepCheckpoint(tmp_path / "run", is_resuming=True).resumed_steps == 2
