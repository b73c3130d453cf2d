"""The training runs that benchmarks/faults.py does harm to: forked processes, which begin within milliseconds."""

import ctypes
import hashlib
import os
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import memwall
from memwall.cli.app import main as memwall_command
from memwall.errors import MemwallError

__all__ = ["BY", "Ended", "Forked", "by_fit", "by_run", "by_trainer"]

NUM_STEPS = 3
_TRAIN = Path(__file__).parents[1] / "tests" / "scripts" / "train_resumable.py"


class Net(nn.Module):
    """Random numbers, statistics that a forward changes, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 24)) for _ in range(2)]
        self.blocks, self.norm, self.head = nn.ModuleList(inner), nn.BatchNorm1d(24), nn.Linear(24, 1)

    def forward(self, values: Tensor, **_: Any) -> dict[str, Tensor]:
        """Returns what transformers' Trainer takes: a loss."""
        for block in self.blocks:
            values = values + block(self.norm(values))
        return {"loss": self.head(values).square().mean()}


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """SHA-256 over parameters, buffers and the optimizer's state."""
    found = hashlib.sha256()
    state = {} if optimizer is None else optimizer.state_dict()["state"]
    moments = [value for _, values in sorted(state.items()) for value in values.values()]
    for tensor in (*model.state_dict().values(), *moments):
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_fit(folder: Path, arm: Callable[[], None]) -> str:
    """Trains by `memwall.fit`, each step handed over, so that it can be done again."""
    model, optimizer = made()
    arm()
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(folder)) as session:
        for _ in range(NUM_STEPS):
            batch = torch.randn(16, 24)
            session.compute_gradients(batch, lambda rows: model(rows)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return digest_of(model, optimizer)


def by_trainer(folder: Path, arm: Callable[[], None]) -> str:
    """Trains by transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    from memwall.integrations import MemwallCallback

    model, _ = made()
    settings = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(
        output_dir=str(folder), max_steps=NUM_STEPS, use_cpu=True, per_device_train_batch_size=16, **settings
    )
    samples = [{"values": torch.randn(24)} for _ in range(64)]
    trainer = Trainer(model=model, args=args, train_dataset=samples, callbacks=[MemwallCallback(budget="1TiB")])
    arm()
    trainer.train()
    return digest_of(model)


def by_run(
    folder: Path,
    arm: Callable[[], None],
    *options: str,
    script: Sequence[str] = (str(_TRAIN),),
    num_steps: int = 4,
) -> str:
    """Trains by `memwall run --checkpoint --resume`; the script begins where the last process has committed."""
    out = folder / "digest.txt"
    os.chdir(folder)
    arm()
    limit = () if "--plan" in options else ("--budget", "1TiB")
    command = ["run", *limit, "--checkpoint", str(folder / "kept"), "--resume", *options, *script]
    status = memwall_command([*command, "--steps", str(num_steps), "--out", str(out)])
    if status:
        raise SystemExit(status)
    if zipfile.is_zipfile(out):  # of torch: two of the same values need not have the same bytes
        return hashlib.sha256(repr(list(_values(torch.load(out, weights_only=True)))).encode()).hexdigest()
    return hashlib.sha256(out.read_bytes()).hexdigest()


def _values(state: Any) -> Iterator[tuple[Any, ...]]:
    """Yields what is in nested dictionaries and lists, tensors as their bytes."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield (key, *_values(value))
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield tuple(_values(value))
    else:
        yield (state.numpy().tobytes() if isinstance(state, Tensor) else state,)


BY = {"fit": by_fit, "run": by_run, "trainer": by_trainer}


class Ended(NamedTuple):
    """Says how a process ended."""

    status: int
    """Exit status; of one that a signal ended its number, negated."""
    digest: str
    """The digest of what it has trained; "" where it did not come to its end."""
    said: str
    """The last lines of standard error."""
    count: int
    """Allocations of tensors from when they were counted on."""


class Forked:
    """A training run in a process of its own.

    Args:
        folder: it has it for itself.
        train: returns a digest of what it trains.
        fail: numbers of the allocations that fail.
    """

    def __init__(
        self, folder: Path, train: Callable[[Path, Callable[[], None]], str], fail: tuple[int, int] = (-1, -1)
    ) -> None:
        self._folder = folder
        for name in ("result.txt", "said.txt", "printed.txt"):
            (folder / name).unlink(missing_ok=True)
        self.process_id = os.fork()
        if self.process_id:
            return
        status = 1
        try:
            for name, stream in (("printed.txt", 1), ("said.txt", 2)):
                os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            library = ctypes.CDLL(None)
            can_fail = hasattr(library, "faults_arm")
            digest = train(folder, lambda: library.faults_arm(*map(ctypes.c_long, fail)) if can_fail else None)
            count = library.faults_count() if can_fail else 0
            if can_fail:
                library.faults_arm(ctypes.c_long(-1), ctypes.c_long(-1))
            (folder / "result.txt").write_text(f"{digest} {count}")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except MemwallError as error:
            sys.stderr.write(f"memwall: {error}\n")
            status = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def printed(self) -> str:
        """Returns what it has printed so far."""
        path = self._folder / "printed.txt"
        return path.read_text() if path.exists() else ""

    def is_over(self) -> bool:
        """Tells whether it has ended; what is to be known of it is `ended`'s from then on."""
        done, status = os.waitpid(self.process_id, os.WNOHANG)
        if done:
            self._status = os.waitstatus_to_exitcode(status)
        return bool(done)

    def ended(self, seconds: float = 120.0) -> Ended | None:
        """Waits for its end; None, and it is killed, where it takes longer."""
        deadline = time.monotonic() + seconds
        while not self.is_over():
            if time.monotonic() > deadline:
                os.kill(self.process_id, 9)
                os.waitpid(self.process_id, 0)
                return None
            time.sleep(0.005)
        result = self._folder / "result.txt"
        digest, count = result.read_text().split() if result.exists() else ("", "0")
        return Ended(self._status, digest, (self._folder / "said.txt").read_text()[-2000:], int(count))
