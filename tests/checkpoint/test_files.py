"""A checkpoint as files of other programs: what they read, and a run that goes on from what they saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_runs import same
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from memwall.checkpoint.files import (
    export_distributed,
    export_safetensors,
    export_torch,
    import_checkpoint,
    read_summary,
)
from memwall.checkpoint.resumption import set_checkpoint, steps
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.cli.app import main
from memwall.errors import StoreError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


class Tied(nn.Module):
    """Two names for one weight, a buffer that is saved, and one that is not; one weight in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.low = nn.Parameter(torch.randn(5, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        out: Tensor = self.head(hidden + self.convolution(hidden[None, None])[0].mean(0))
        return out


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train_to(num_steps: int, directory: Path | None, parts: tuple[nn.Module, torch.optim.Optimizer, Any]) -> None:
    """Trains in `directory`'s run, from where that is."""
    model, optimizer, schedule = parts
    checkpoint = None if directory is None else StepCheckpoint(directory, is_resuming=True)
    set_checkpoint(checkpoint)
    is_attached = False
    for step in steps(num_steps):
        if checkpoint is not None and not is_attached:
            checkpoint.attach(model)
            is_attached = True
        model(torch.arange(6) + step % 6).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    set_checkpoint(None)
    if checkpoint is not None:
        checkpoint.close(completed=True)
        assert checkpoint.failure is None


def test_exported_weights_are_what_the_model_itself_would_save(tmp_path: Path) -> None:
    parts = made()
    train_to(3, tmp_path / "run", parts)
    assert export_safetensors(tmp_path / "run", tmp_path / "model.safetensors") == 3
    expected = parts[0].state_dict()
    del expected["head.weight"]  # tied: written under the first of its names
    assert same(load_file(tmp_path / "model.safetensors"), expected)


def test_an_exported_state_dict_is_loaded_as_any_other(tmp_path: Path) -> None:
    model, optimizer, schedule = parts = made()
    train_to(3, tmp_path / "run", parts)
    assert export_torch(tmp_path / "run", tmp_path / "model.pt") == 3
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    other_model, other_optimizer, other_schedule = made()
    other_model.load_state_dict(content["model"])
    other_optimizer.load_state_dict(content["optimizer"])
    ((name, state),) = content["helpers"]
    other_schedule.load_state_dict(state)
    assert name == "StepLR"
    assert content["step"] == 3
    assert same(other_model.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert other_schedule.state_dict() == schedule.state_dict()


def test_what_is_exported_is_loaded_by_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    model, optimizer, _ = parts = made()
    train_to(3, tmp_path / "run", parts)
    target = tmp_path / "distributed"
    assert main(["checkpoint", str(tmp_path / "run"), "-o", str(target), "--to", "distributed"]) == 0
    other_model, other_optimizer, _ = made()
    of_model, of_optimizer = get_state_dict(other_model, other_optimizer)
    checkpoint.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=target, no_dist=True)
    set_state_dict(other_model, other_optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert same(other_model.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    with pytest.raises(UsageError, match="distributed is there already; give the name of a new folder"):
        export_distributed(tmp_path / "run", target)


@pytest.mark.slow
def test_a_run_goes_on_from_an_imported_state_dict(tmp_path: Path) -> None:
    plain = made()
    train_to(5, None, plain)
    saved = made()
    train_to(3, None, saved)
    torch.save({"model": saved[0].state_dict(), "optimizer": saved[1].state_dict()}, tmp_path / "theirs.pt")

    loaded = torch.load(tmp_path / "theirs.pt", weights_only=True)
    model, optimizer, schedule = made()
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(saved[2].state_dict())
    import_checkpoint(tmp_path / "run", model, optimizer, step=3)
    assert read_summary(tmp_path / "run").step == 3

    resumed = made()
    train_to(5, tmp_path / "run", resumed)
    assert same(resumed[0].state_dict(), plain[0].state_dict())
    assert same(resumed[1].state_dict(), plain[1].state_dict())


def test_nothing_is_imported_over_a_run(tmp_path: Path) -> None:
    model, optimizer, _ = made()
    import_checkpoint(tmp_path / "run", model, optimizer, step=0)
    with pytest.raises(UsageError, match="holds step 0 of a run"):
        import_checkpoint(tmp_path / "run", model, optimizer, step=1)


def test_the_command_shows_and_exports_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_to(2, tmp_path / "run", made())
    directory, output = str(tmp_path / "run"), tmp_path / "model.safetensors"
    assert main(["checkpoint", directory, "-o", str(output)]) == 0
    size = (tmp_path / "run" / "memwall.data").stat().st_size
    assert capsys.readouterr().out == (
        f"{directory}: step 2, 141 parameters (554 B), 1.1 KiB of AdamW state, {size / 1024:.1f} KiB on disk; every "
        f"byte as it was written\nstep 2 written to {output}\n"
    )
    assert set(load_file(output)) == {"embedding.weight", "convolution.weight", "convolution.bias", "low", "count"}
    assert main(["checkpoint", directory, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{cwd}/none", "there is no folder {cwd}/none; expected one written by memwall run --checkpoint"),
        ("{cwd}", "{cwd} holds no committed step; expected one written by memwall run --checkpoint"),
        ("{cwd} --to torch", "checkpoint: --to torch needs --output FILE"),
        ("{cwd} --to gguf -o {cwd}/x", "--to: 'gguf' is not known; expected one of safetensors, torch, distributed"),
    ],
)
def test_the_command_says_what_it_cannot_use(
    tmp_path: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", *arguments.format(cwd=tmp_path).split()]) == 2
    assert capsys.readouterr().err == f"memwall: {message.format(cwd=tmp_path)}\n"


def test_the_command_changes_nothing_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that is mounted read-only can be verified, and a mistyped folder stays as it was."""
    train_to(2, tmp_path / "run", made())
    (tmp_path / "empty").mkdir()

    def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
        found = {path.name: path.lstat() for path in (folder, *folder.iterdir())}
        return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found.items()}

    for folder, status in ((tmp_path / "run", 0), (tmp_path / "empty", 2)):
        folder.chmod(0o555)
        before = state_of(folder)
        assert main(["checkpoint", str(folder)]) == status
        assert state_of(folder) == before
    assert "holds no committed step" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["memwall.lock", "memwall.commit", "memwall.data"])
def test_the_command_follows_no_link(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_to(1, tmp_path / "run", made())
    path, target = tmp_path / "run" / name, tmp_path / "precious"
    path.rename(target)
    before = target.read_bytes()
    path.symlink_to(target)
    assert main(["checkpoint", str(tmp_path / "run")]) == 2
    assert f"{path} is a symbolic link; expected a file that memwall made there" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    train_to(1, tmp_path / "run", made())
    target = tmp_path / "file" / "model.pt"
    with pytest.raises(StoreError, match=r"cannot write the checkpoint to .*model.pt: No such file or directory"):
        export_torch(tmp_path / "run", target)
    assert not target.parent.exists()
