"""The training runs that benchmarks/faults.py does harm to: forked processes, which begin within milliseconds."""

import ctypes
import gc
import hashlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import memwall
from memwall import patches
from memwall.apply.offload import parking
from memwall.cli.app import main as memwall_command
from memwall.errors import MemwallError
from memwall.machine import memory_speed
from memwall.planning.planfile import Plan
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.recompute import Recompute

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from plans import plan_of

__all__ = [
    "BY",
    "LEFT_CHANGED",
    "NUM_STEPS",
    "Ended",
    "Forked",
    "by_fit",
    "by_run",
    "by_trainer",
    "left_alone",
    "warm_up",
]

NUM_STEPS = 3
LEFT_CHANGED = 77
"""Status of a process whose session ended, and left the model or torch changed."""
_TRAIN = Path(__file__).parents[1] / "tests" / "scripts" / "train_resumable.py"


class Net(nn.Module):
    """Random numbers, statistics that a forward changes, and two blocks; few parameters, as each has allocations."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Sequential(nn.Linear(24, 24, bias=False), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
        self.blocks, self.norm, self.head = nn.ModuleList(inner), nn.BatchNorm1d(24), nn.Linear(24, 1, bias=False)

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


def plan_for(model: nn.Module) -> Plan:
    """A plan with something to recompute, something that leaves, and state on disk."""
    return plan_of(
        model,
        Recompute(block="blocks.0"),
        Offload(block="blocks.1", scope="saved", tier="disk", min_bytes=1024, window_bytes=4 << 20),
        OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=32768, min_bytes=1024),
        micro_batch=16,
    )


def by_fit(folder: Path, arm: Callable[[], None], *, is_planned: bool = False, is_handed_over: bool = True) -> str:
    """Trains by `memwall.fit`, for a budget or by a plan; steps that are not handed over are a plain loop's."""
    model, optimizer = made()
    how: dict[str, Any] = {"plan": plan_for(model)} if is_planned else {"budget": "1TiB"}
    arm()
    with _nothing_left(), memwall.fit(model, optimizer, disk=str(folder), **how) as session:
        for _ in range(NUM_STEPS):
            batch = torch.randn(16, 24)
            if not is_handed_over:
                model(batch)["loss"].backward()
            else:
                session.compute_gradients(batch, lambda rows: model(rows)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return digest_of(model, optimizer)


@contextmanager
def _nothing_left() -> Iterator[None]:
    """Ends the process where a session that was closed, by whatever, has left changes."""
    try:
        yield
    finally:
        left = [change for change in patches.active() if not change.permanent]
        if left:
            sys.stderr.write("".join(f"left changed: {one.what} {one.where}: {one.why}\n" for one in left))
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(LEFT_CHANGED)


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
    with _nothing_left():
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


def left_alone(home: Path, train: Callable[[Path, Callable[[], None]], str]) -> "Ended":
    """Trains in a folder that is made anew; what was harmed is compared with that.

    Raises:
        SystemExit: it did not come to its end.
    """
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    ended = Forked(home, train).ended()
    if ended is None or not ended.digest:
        raise SystemExit(f"a run that was left alone did not end: {ended}")
    return ended


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


BY: dict[str, Callable[[Path, Callable[[], None]], str]] = {
    "fit": by_fit,
    "fit, plain loop": partial(by_fit, is_handed_over=False),
    "fit under a plan": partial(by_fit, is_planned=True, is_handed_over=False),
    "run": partial(by_run, num_steps=NUM_STEPS),
    "trainer": by_trainer,
}


@cache
def warm_up() -> None:
    """Has processes that are forked from here on begin within milliseconds.

    They import nothing: what a first one has imported is imported here. Collections of garbage pass over what is here
    already, and so does the search for optimizers, which has to find none of it. And what each first step measures of
    disk and memory is measured on fewer bytes.
    """
    parking._PROBE_BYTES, memory_speed._PROBE_BYTES = 1 << 16, 1 << 20
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        for train in BY.values():

            def imported(folder: Path, arm: Callable[[], None], train: Any = train) -> str:
                train(folder, arm)
                return ",".join(sys.modules)

            ended = Forked(Path(name), imported).ended()
            for module in "" if ended is None else ended.digest.split(","):
                with suppress(Exception):  # what a library has put there without being a module
                    importlib.import_module(module)
    model, optimizer = made()
    model(torch.randn(16, 24))["loss"].backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0


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
        self._status: int | None = None
        for name in ("result.txt", "said.txt", "printed.txt"):
            (folder / name).unlink(missing_ok=True)
        self.process_id = os.fork()
        if self.process_id:
            return
        status = 1
        # A shell that starts this in its background has it ignored, and a run in front of somebody has not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        return self._text("printed.txt")

    def is_over(self) -> bool:
        """Tells whether it has ended."""
        if self._status is None:
            done, status = os.waitpid(self.process_id, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if done else None
        return self._status is not None

    def ended(self, seconds: float = 120.0) -> Ended | None:
        """Waits for its end; None, and it is killed, where it takes longer."""
        deadline = time.monotonic() + seconds
        while not self.is_over():
            if time.monotonic() > deadline:
                os.kill(self.process_id, 9)
                os.waitpid(self.process_id, 0)
                return None
            time.sleep(0.005)
        result = self._text("result.txt") or " 0"
        digest, count = result.split(" ")
        return Ended(self._status or 0, digest, self._text("said.txt")[-8000:], int(count))

    def _text(self, name: str) -> str:
        """Returns what a file has; "" where the process has ended before it had made it."""
        path = self._folder / name
        return path.read_text() if path.exists() else ""
