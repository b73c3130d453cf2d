"""One of four ranks is killed, stopped or starved of memory at random instants; does anything hang, or go astray?

    python benchmarks/ranks_faults.py                        # 20 instants each under DDP and FSDP2, about 15 minutes
    python benchmarks/ranks_faults.py --divided ddp --instants 0 7    # a part of them; each part is written on its own
    python benchmarks/ranks_faults.py --only redone          # the steps that ranks do again, about three minutes

One run goes through all instants of a part: it is resumed after each, until the next one. An instant is a time from a
seed, for one in four after the ranks were started, while they start, record or plan; for the others after the first
step that this rank has committed since then, while they train and commit. Then a rank gets SIGKILL, or SIGSTOP, or may
take no more memory (RLIMIT_AS). No launcher ends the others here: they have to find out. Afterwards the run goes on for
ten steps, and is compared with one that nobody disturbed.

Memory that runs out in a step on one rank is another matter: of a loop that hands its batches to a session all ranks do
that step again, under a plan that needs less. Ten runs each lack it once, in the forward or the backward of a step from
the same seed.

Writes results/cpu/ranks_faults.json and prints a table of it.
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp  # once, before the forks
from free_ports import free_port
from revision import commit

import memwall.integrations.launcher
import memwall.planning.search  # noqa: F401
from memwall.cli.app import main as memwall_main
from memwall.store.journal import recorded_steps

HERE = Path(__file__).parent
CHILD = HERE / "ranks_faults_child.py"
NUM_RANKS, NUM_INSTANTS, STEPS_AFTER = 4, 20, 10
# After so many, a rank that may take no more memory needs none: what it has is enough for its steps.
STEPS_UNHARMED = 100
MOST_SECONDS = 60.0
LATEST_SECONDS = {"start": 5.0, "first commit": 1.5}
KINDS = ("killed", "stopped", "starved")
NUM_REDONE, REDONE_STEPS = 10, 6
LACKS = "out of memory in a step"


class Fault(NamedTuple):
    """Says what befalls a rank, and when."""

    kind: str
    rank: int
    since: str
    after_seconds: float


def faults_of(divided: str, num_instants: int = NUM_INSTANTS) -> list[Fault]:
    """Returns the same faults each time, kinds in turn."""
    drawn, found = random.Random(divided), []
    for number in range(num_instants):
        since = "first commit" if number % 4 else "start"
        after_seconds = drawn.uniform(0.0, LATEST_SECONDS[since])
        found.append(Fault(KINDS[number % 3], drawn.randrange(NUM_RANKS), since, after_seconds))
    return found


class Ranks:
    """Forks so many processes of this one, which has imported what they need, and has them run the child.

    Args:
        folder: of the run.
        arguments: of the child.
        is_plain: whether without memwall's command.
    """

    def __init__(self, folder: Path, *arguments: str, is_plain: bool = False) -> None:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(NUM_RANKS)}
        self.began_seconds = time.monotonic()
        self.running: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        for rank in range(NUM_RANKS):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
            process = os.fork()
            if process == 0:
                _become(shared | place, folder, arguments, is_plain=is_plain)
            self.running[rank] = process

    def look(self) -> None:
        """Notes which of them have ended."""
        for rank, process in list(self.running.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self.running[rank]
                self.statuses[rank] = os.waitstatus_to_exitcode(status)

    def wait(self, but: int = -1, most_seconds: float = 240.0, goes_on: Callable[[], bool] = lambda: False) -> float:
        """Returns how many seconds it takes until all but one of them have ended, or all are found to go on."""
        begin = time.monotonic()
        while set(self.running) - {but} and time.monotonic() - begin < most_seconds and not goes_on():
            time.sleep(0.01)
            self.look()
        return time.monotonic() - begin

    def end(self) -> None:
        """Kills what is left."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.wait()


def _become(environment: dict[str, str], folder: Path, arguments: tuple[str, ...], *, is_plain: bool) -> None:
    status = 1
    try:
        output = os.open(folder / f"rank-{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        child = [str(CHILD), str(folder), *arguments]
        if is_plain:
            sys.argv = child
            exec(compile(CHILD.read_text(), str(CHILD), "exec"), {"__name__": "__main__"})
            status = 0
        else:
            steps = str(folder / "steps")
            status = memwall_main(["run", "--budget", "4GiB", "--checkpoint", steps, "--resume", *child])
    finally:
        sys.stdout.flush()
        os._exit(status)


def befall(fault: Fault, ranks: Ranks, folder: Path) -> bool:
    """Has a fault happen at its instant; returns whether the rank was still there."""
    before, began = last_steps(folder)[fault.rank], ranks.began_seconds if fault.since == "start" else None
    while began is None or time.monotonic() - began < fault.after_seconds:
        time.sleep(0.005)
        ranks.look()
        if fault.rank not in ranks.running:
            return False
        if began is None and last_steps(folder)[fault.rank] > before:
            began = time.monotonic()
    if fault.rank not in ranks.running:
        return False
    process = ranks.running[fault.rank]
    if fault.kind == "starved":
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
        held_bytes = pages * resource.getpagesize()
        resource.prlimit(process, resource.RLIMIT_AS, (held_bytes, resource.RLIM_INFINITY))
        return True
    os.kill(process, signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP)
    return True


def last_steps(folder: Path) -> list[int]:
    """Returns the last step that each rank has committed."""
    folders = [folder / "steps" / f"rank-{rank}-of-{NUM_RANKS}" for rank in range(NUM_RANKS)]
    return [max(recorded_steps(str(each)), default=0) for each in folders]


def disturbed(divided: str, faults: list[Fault], folder: Path) -> dict[str, Any]:
    """Returns what became of a run that one fault after the other befell, and then none."""
    options = ("--fsdp2",) if divided == "fsdp2" else ()
    rows: list[dict[str, Any]] = []
    for fault in faults:
        # More steps than there is time for.
        ranks = Ranks(folder, "--steps", "100000", *options)
        try:
            was_there = befall(fault, ranks, folder)
            unharmed_at = max(last_steps(folder)) + STEPS_UNHARMED

            def goes_on(last: int = unharmed_at) -> bool:
                return min(last_steps(folder)) >= last

            seconds = ranks.wait(but=fault.rank, goes_on=goes_on)
            is_harmed = not goes_on()
        finally:
            ranks.end()
        steps = last_steps(folder)
        # Memory is there again; the run was told to plan for less.
        (folder / "steps" / "out-of-memory.json").unlink(missing_ok=True)
        rows.append(
            {
                "kind": fault.kind,
                "since": fault.since,
                "after_seconds": round(fault.after_seconds, 3),
                "others_ended_seconds": round(seconds, 2),
                "last_step": max(steps),
                "apart_steps": max(steps) - min(steps),
                "was_there": was_there,
                "is_harmed": is_harmed,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    total = max(last_steps(folder)) + STEPS_AFTER
    undisturbed = folder / "plain"
    undisturbed.mkdir()
    for is_plain in (False, True):
        ranks = Ranks(undisturbed if is_plain else folder, "--steps", str(total), *options, is_plain=is_plain)
        ranks.wait()
        ranks.end()
        if any(ranks.statuses.values()):
            sys.stderr.write((folder / "rank-0.log").read_text()[-3000:])
            raise SystemExit(f"a run that nothing befell ended with {ranks.statuses}")
    return {"instants": rows, "num_steps": total} | compared(folder, undisturbed)


def redone(divided: str, folder: Path, num_runs: int = NUM_REDONE) -> dict[str, Any]:
    """Returns what became of runs in each of which one rank lacked memory once, beside one in which none did."""
    options = ("--steps", str(REDONE_STEPS), "--redoes", *(("--fsdp2",) if divided == "fsdp2" else ()))
    undisturbed = folder / "plain"
    undisturbed.mkdir()
    # The same loop without a session: each step takes its batch once.
    finish(undisturbed, *(option for option in options if option != "--redoes"))
    drawn = random.Random(divided)
    rows: list[dict[str, Any]] = []
    for number in range(num_runs):
        here = folder / str(number)
        here.mkdir()
        # The first step is recorded, and has no plan that could need less.
        step, rank = drawn.randrange(2, REDONE_STEPS + 1), drawn.randrange(NUM_RANKS)
        place = ("forward", "backward")[number % 2]
        finish(here, *options, "--fails", str(step), str(rank), place)
        told = [json.loads((here / f"{each}.json").read_text()) for each in range(NUM_RANKS)]
        rows.append(
            {
                "kind": LACKS,
                "place": place,
                "step": step,
                "num_redone": [each["num_recoveries"] for each in told],
                "step_seconds": round(max(each["step_seconds"][step - 1] for each in told), 2),
            }
            | compared(here, undisturbed)
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    worst = max(rows, key=lambda row: row["difference_ratio"])
    return {
        "instants": rows,
        "num_steps": REDONE_STEPS,
        "is_equal": all(row["is_equal"] for row in rows),
        "difference_ratio": worst["difference_ratio"],
    }


def finish(folder: Path, *arguments: str) -> None:
    """Runs ranks to their end, which is to be a good one."""
    ranks = Ranks(folder, *arguments, is_plain=True)
    ranks.wait()
    ranks.end()
    if any(ranks.statuses.values()):
        sys.stderr.write((folder / "rank-0.log").read_text()[-3000:])
        raise SystemExit(f"a run whose ranks should go on ended with {ranks.statuses}")


def compared(folder: Path, undisturbed: Path) -> dict[str, Any]:
    """Returns whether weights are equal to the bit on all ranks, and the most that one differs by from the largest."""
    is_equal, differs = True, 0.0
    for rank in range(NUM_RANKS):
        ours, theirs = (torch.load(each / f"{rank}.pt") for each in (folder, undisturbed))
        for one, other in zip(ours, theirs, strict=True):
            is_equal &= torch.equal(one, other)
            differs = max(differs, float((one - other).abs().max() / other.abs().max()))
    return {"is_equal": is_equal, "difference_ratio": differs}


def table(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a row for each way to divide and each kind of fault."""
    lines = []
    for divided in ("ddp", "fsdp2"):
        of_both = {name: part for name, part in parts.items() if name.split("-")[0] == divided}
        redone_part = of_both.pop(f"{divided}-redone", None)
        chosen = list(of_both.values())
        every = [row for part in chosen for row in part["instants"]]
        for kind in KINDS:
            rows = [row for row in every if row["kind"] == kind]
            if rows:
                slowest = max(row["others_ended_seconds"] for row in rows if row.get("is_harmed", True))
                apart = max(row["apart_steps"] for row in rows)
                same = _same(chosen)
                unharmed = sum(not row.get("is_harmed", True) for row in rows)
                number = f"{len(rows)}, {unharmed} unharmed" if unharmed else str(len(rows))
                lines.append(f"| {divided} | {kind} | {number} | {slowest:.1f} s | {apart} | {same} |")
        if redone_part is not None:
            rows = redone_part["instants"]
            num_redone = sum(row["num_redone"] == [1] * NUM_RANKS for row in rows)
            slowest = max(row["step_seconds"] for row in rows)
            ended = f"none ended; {num_redone} done again, within {slowest:.1f} s"
            lines.append(f"| {divided} | {LACKS} | {len(rows)} | {ended} | - | {_same([redone_part])} |")
    return lines


def _same(parts: list[dict[str, Any]]) -> str:
    """Says how like the weights are at last; DDP tells after its second step in which order it sums from then on."""
    unlike = [part for part in parts if not part["is_equal"]]
    if not unlike:
        return "equal"
    within = f"{max(part['difference_ratio'] for part in unlike):.1e}"
    went_on_from = [{row["last_step"] - row["apart_steps"] for row in part["instants"]} for part in unlike]
    if len(unlike) < len(parts) and all(1 in steps for steps in went_on_from):
        return f"equal; within {within} in a run that went on from step 1"
    return f"within {within}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divided", nargs="*", default=["ddp", "fsdp2"])
    parser.add_argument("--instants", nargs=2, type=int, default=(0, NUM_INSTANTS), metavar=("FIRST", "END"))
    parser.add_argument("--only", choices=("disturbed", "redone"), help="either kind of run; by default both")
    asked = parser.parse_args()
    first, end = asked.instants
    path = HERE / "results" / "cpu" / "ranks_faults.json"
    for divided in asked.divided:
        if asked.only != "redone":
            with tempfile.TemporaryDirectory() as folder:
                part = disturbed(divided, faults_of(divided)[first:end], Path(folder))
            _write(path, f"{divided}-{first}-{end}", part)
        if asked.only != "disturbed":
            with tempfile.TemporaryDirectory() as folder:
                part = redone(divided, Path(folder))
            _write(path, f"{divided}-redone", part)


def _write(path: Path, name: str, part: dict[str, Any]) -> None:
    """Writes one part beside those that are there, and prints the table of all."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    parts[name] = part | {"commit": commit()}
    about = {"tag": "cpu-measured", "torch": torch.__version__, "num_ranks": NUM_RANKS}
    path.write_text(json.dumps(about | {"parts": parts}, indent=2, sort_keys=True) + "\n")
    print("\n".join(table(parts)), flush=True)


if __name__ == "__main__":
    main()
