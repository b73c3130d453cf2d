"""Records for tests/golden without a GPU: what `allocator_programs.py` has, on torch's own allocator over the stub.

What a training program asks for is taken from its recording on fake tensors; nothing runs on a device, so the requests
are simulated and what the allocator does with them is real.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from msgspec.structs import replace

from benchmarks.allocator_oracle.cases import TorchAllocator
from benchmarks.allocator_oracle.libraries import Oracle
from benchmarks.allocator_programs import (
    LIMIT_BYTES,
    MLP_BATCHES,
    ONE_SEGMENT_BYTES,
    RUNS,
    SEGMENT_MIB,
    SENTENCE_LENGTHS,
    mlp,
    transformer,
)
from benchmarks.allocator_record import EMPTY_CACHE, MEMORY_FRACTION, AllocatorRecord, record_of
from memwall.predict.cuda_allocator.allocator_events import ALLOC, FREE, events_of_steps
from memwall.trace.fake import fake_run
from memwall.trace.records import Step
from memwall.trace.trace_builder import run_recorded
from memwall.trace.workload import Workload

__all__ = ["stub_records"]

MIB = 1 << 20
_TOTAL_BYTES = 16 << 30
_SIDE_STREAM = 2000


def stub_records(oracle: Oracle, version: str) -> Iterable[AllocatorRecord]:
    """Every run of `RUNS` by one release of torch."""
    for program, settings in RUNS:
        variables = {
            "PYTORCH_CUDA_ALLOC_CONF": settings,
            "STUB_TOTAL_BYTES": str(_TOTAL_BYTES),
            "STUB_CAPACITY_BYTES": str(_TOTAL_BYTES),
            "STUB_IS_DESCENDING": "0",
        }
        with TorchAllocator(oracle, variables) as torch:
            torch.call("H")
            run = _Run(torch)
            _PROGRAMS[program](run)
            history = torch.history()
        yield record_of(
            history,
            run.marks,
            program=program,
            tag="simulated",
            device="stub of the CUDA runtime",
            torch=version,
            settings=settings,
            total_bytes=_TOTAL_BYTES,
            free_bytes=_TOTAL_BYTES,
            statistics=history["statistics"],
        )


class _Run:
    """A program's calls, with marks between them."""

    def __init__(self, torch: TorchAllocator) -> None:
        self.marks: list[str] = []
        self._torch = torch
        self._num_blocks = 0

    def call(self, text: str) -> int | str:
        return self._torch.call(text)

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        """The number of the new block."""
        self._num_blocks += 1
        found = self.call(f"a {self._num_blocks} {num_bytes} {stream}")
        assert found != "oom", f"{num_bytes} bytes were refused"
        return self._num_blocks

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self.call(f"f {block}")

    def mark(self, text: str) -> None:
        self.marks.append(text)
        self.call("N")

    def limit(self, num_bytes: int) -> None:
        fraction = num_bytes / _TOTAL_BYTES
        self.mark(f"{MEMORY_FRACTION} {fraction!r}")
        self.call(f"m {fraction!r}")

    def empty_cache(self) -> None:
        self.mark(EMPTY_CACHE)
        self.call("e")


@cache
def _steps(workload: Callable[[int], Workload], size: int) -> tuple[Step, ...]:
    """The first step and a steady one."""
    step = workload(size)
    with fake_run(step, [step.make_batch], target="cuda") as run:
        return run_recorded(run.builder, step, run.model, run.optimizer, run.batches[0], num_steps=2).steps


def _on_device(step: Step) -> Step:
    storages = tuple(replace(storage, device="cuda") for storage in step.storages if storage.device == "cpu")
    return replace(step, storages=storages)


def _train(workload: Callable[[int], Workload], sizes: Sequence[int], run: _Run) -> None:
    steps = [_steps(workload, size)[min(number, 1)] for number, size in enumerate(sizes)]
    trace = events_of_steps([_on_device(step) for step in steps], num_repeats=1)
    number_of: dict[int, int] = {}
    for start, end in zip((0, *trace.steps), (*trace.steps, len(trace.events)), strict=True):
        if start:
            run.mark("phase step")
        for action, block, num_bytes, _ in trace.events[start:end]:
            if action == ALLOC:
                number_of[block] = run.allocate(num_bytes)
            else:
                assert action == FREE, "steps of one stream allocate and free"
                run.free(number_of.pop(block))
        if start == trace.steps[0]:
            run.empty_cache()


def _cross_stream(run: _Run) -> None:
    """A batch comes on the side stream and is used on the main one, a result goes out on the side stream."""
    layer = [run.allocate(size) for size in (16 * MIB, 8192)]
    for number in range(12):
        run.mark(f"phase step {number}")
        num_bytes = 4 * MIB * (1 + number % 4)
        batch = run.allocate(num_bytes, _SIDE_STREAM)
        run.call(f"r {batch} 0")
        product, found = run.allocate(num_bytes), run.allocate(num_bytes)
        run.free(product)
        run.call(f"r {found} {_SIDE_STREAM}")
        run.free(batch)
        if number % 3 == 1:
            run.call("d 0")
        run.free(found)
        if number % 2:
            run.call(f"d {_SIDE_STREAM}")
        if number == 8:
            run.empty_cache()
    run.free(*layer)


def _out_of_memory(run: _Run) -> None:
    run.limit(ONE_SEGMENT_BYTES)
    first, middle, last = (run.allocate(size * MIB) for size in SEGMENT_MIB)
    run.call(f"r {middle} {_SIDE_STREAM}")
    run.free(middle)
    assert run.call(f"a 98 {SEGMENT_MIB[1] * MIB} 0") == "oom"
    middle = run.allocate(SEGMENT_MIB[1] * MIB)
    run.limit(LIMIT_BYTES)
    held = [run.allocate(20 * (1 + number % 3) * MIB) for number in range(9)]
    run.free(*held[::2])
    kept = [run.allocate(230 * MIB)]
    assert run.call(f"a 99 {LIMIT_BYTES} 0") == "oom"
    kept.append(run.allocate(3 * MIB))
    run.free(*held[1::2], *kept, first, middle, last)


_PROGRAMS: dict[str, Callable[[_Run], None]] = {
    "static-mlp": lambda run: _train(mlp, MLP_BATCHES, run),
    "variable-transformer": lambda run: _train(transformer, SENTENCE_LENGTHS, run),
    "cross-stream": _cross_stream,
    "out-of-memory": _out_of_memory,
}
