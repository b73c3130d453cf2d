"""Trains in child processes that are killed at random instants, until one is left alone; prints what came of it.

Children are forked, so that each begins within milliseconds and the kills fall into the steps and their commits.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import torch
from streamed_models import put_on_disk
from torch import nn

import memwall
from memwall.checkpoint.resumption import set_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint

WIDTH = 384


def train(num_steps: int, directory: Path | None, out: Path, report: int, *, is_on_disk: bool) -> None:
    """The whole run, or what is left of it; writes a byte to `report` per step, and a digest at the end."""
    checkpoint = None if directory is None else StepCheckpoint(directory, is_resuming=True)
    set_checkpoint(checkpoint)
    if checkpoint is not None:
        with out.with_name("resumed.txt").open("a") as file:
            file.write(f"{checkpoint.resumed_steps}\n")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    is_attached = checkpoint is None
    closing = ExitStack()
    for _ in memwall.steps(num_steps):
        x = torch.randn(64, 32)
        if checkpoint is not None and not is_attached:
            if is_on_disk:
                closing.callback(put_on_disk(model, optimizer)[1])
            checkpoint.attach(model)
            is_attached = True
        os.write(report, b".")
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if checkpoint is not None:
        checkpoint.finish(completed=True)
        closing.close()
        checkpoint.close(completed=False)
        if checkpoint.failure is not None:
            raise checkpoint.failure
    digest = hashlib.sha256()
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    for value in [*model.state_dict().values(), *moments]:
        digest.update(value.numpy().tobytes())
    out.write_text(digest.hexdigest())


def child(num_steps: int, directory: Path | None, out: Path, *, is_on_disk: bool) -> tuple[int, int]:
    """Starts training in a process of its own; its number, and a pipe with a byte for each step that it begins."""
    reading, writing = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        status = 1
        try:
            train(num_steps, directory, out, writing, is_on_disk=is_on_disk)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    return process_id, reading


def kill_in_a_step(process_id: int, reading: int, draw: random.Random) -> None:
    """Kills a child while it begins or continues, some time in its first steps, or in the one after them."""
    seconds, num_steps = 0.1, draw.choice((0, 2, 3, 4))
    # The first of two bytes ends what comes before the steps: the time of a step lies between them.
    for _ in range(num_steps):
        began = time.perf_counter()
        os.read(reading, 1)
        seconds = time.perf_counter() - began
    time.sleep(draw.uniform(0, min(seconds, 0.5)))
    os.kill(process_id, signal.SIGKILL)
    status = os.waitpid(process_id, 0)[1]
    os.close(reading)
    if not os.WIFSIGNALED(status):
        raise SystemExit(f"a child ended by itself, with status {status}")


def finish(num_steps: int, directory: Path | None, out: Path, *, is_on_disk: bool) -> None:
    """Lets a child train to the end."""
    process_id, reading = child(num_steps, directory, out, is_on_disk=is_on_disk)
    status = os.waitpid(process_id, 0)[1]
    os.close(reading)
    if status:
        raise SystemExit(f"a run that was left alone failed, with status {status}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--on-disk", action="store_true", help="parameters, gradients and optimizer state")
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_steps = 20 + 6 * args.kills
    draw = random.Random(args.kills)
    plain, out = args.folder / "plain.txt", args.folder / "killed.txt"
    finish(num_steps, None, plain, is_on_disk=False)
    for _ in range(args.kills):
        kill_in_a_step(*child(num_steps, args.folder / "run", out, is_on_disk=args.on_disk), draw)
    finish(num_steps, args.folder / "run", out, is_on_disk=args.on_disk)
    resumed = (args.folder / "resumed.txt").read_text().split()
    found = {"killed": args.kills, "plain_sha256": plain.read_text(), "sha256": out.read_text()}
    print(json.dumps({**found, "resumed_steps": [int(step) for step in resumed]}))


if __name__ == "__main__":
    main()
