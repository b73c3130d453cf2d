"""Brings back, one after the other, faults that the project has had, and sees that the tests find each.

    python tests/mutations [WORD...]    only faults that have one of these words in them

The product is copied for it, so that nothing happens to the working tree. Exit status 1: a fault was not found, a
place is no longer as the table has it, or tests fail without any fault.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from mutations.table import MUTATIONS, Mutation  # noqa: E402

COPIED = ("memwall", "triton_kernels", "tests", "benchmarks", "docs")
FILES = ("pyproject.toml", "README.md")
FAILED = 1
"""pytest's status where tests ran and one failed; others say that they could not run."""


def copied(folder: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    (folder / "memwall" / "triton_kernels").symlink_to(folder / "triton_kernels")


def tested(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Returns pytest's status for these tests, and what it said."""
    missing = [test for test in tests if not (folder / test.partition("::")[0]).exists()]
    if missing:
        return -1, f"there is no {', '.join(missing)}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout[-2000:] + done.stderr[-500:]


def problem_of(mutation: Mutation, folder: Path) -> str:
    """Returns why a fault counts as not found; an empty text where a test fails with it."""
    path = folder / mutation.path
    if not path.exists():
        return f"there is no {mutation.path}: write this mutation anew"
    source = path.read_text()
    count = source.count(mutation.text)
    if count != 1:
        return f"{mutation.path} has its text {count} times, and not once: write this mutation anew"
    path.write_text(source.replace(mutation.text, mutation.faulty))
    try:
        status, said = tested(folder, mutation.tests)
    finally:
        path.write_text(source)
    if status == FAILED:
        return ""
    return "no test fails" if status == 0 else f"the tests could not run (status {status}):\n{said}"


def main(words: list[str]) -> int:
    chosen = [one for one in MUTATIONS if not words or any(word in one.fault for word in words)]
    num_problems = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        copied(folder)
        every_test = tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
        status, said = tested(folder, every_test)
        if status != 0:
            print(f"without any fault the tests end with status {status}:\n{said}")
            return 1
        for mutation in chosen:
            begin = time.perf_counter()
            problem = problem_of(mutation, folder)
            num_problems += bool(problem)
            seconds = time.perf_counter() - begin
            print(f"{'NOT FOUND' if problem else 'found':9}  {seconds:5.1f} s  {mutation.fault}", flush=True)
            if problem:
                print(f"           {problem}", flush=True)
    print(f"{len(chosen) - num_problems} of {len(chosen)} faults are found")
    return 1 if num_problems or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
