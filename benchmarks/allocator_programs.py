"""What is recorded of torch's allocator: four programs, and settings under which one of them runs again.

Each in a process of its own (`gpu_record_case.py`), with the history on before the first allocation. Those that train
are workloads, so that their requests are also known without a GPU (`allocator_oracle/golden.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.trace.workload import Workload

__all__ = ["PROGRAMS", "RUNS", "WHAT_IFS", "Marks", "mlp", "transformer", "MLP_BATCHES", "SENTENCE_LENGTHS"]

MIB = 1 << 20
MLP_BATCHES = (1024,) * 4
SENTENCE_LENGTHS = (128, 200, 96, 333, 250, 128, 400, 64)
"""By step: growing ones ask for new segments, shorter ones leave gaps behind."""
LIMIT_BYTES = 512 * MIB
ONE_SEGMENT_BYTES = 21 * MIB
SEGMENT_MIB = (3, 9, 8)
"""Together they fill one segment."""

_VARIABLE = "variable-transformer"
WHAT_IFS = (
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:64",
)
"""The first is one of the five recordings, too; the other three are only run for their peaks and histories."""
RUNS: tuple[tuple[str, str], ...] = (
    ("static-mlp", ""),
    (_VARIABLE, ""),
    ("cross-stream", ""),
    ("out-of-memory", ""),
    (_VARIABLE, WHAT_IFS[0]),
    *((_VARIABLE, settings) for settings in WHAT_IFS[1:]),
)
"""Program and PYTORCH_CUDA_ALLOC_CONF."""


class Marks(Protocol):
    """What a history has no events for; each call leaves one."""

    def phase(self, name: str) -> None:
        """Names what comes next."""

    def empty_cache(self) -> None:
        """Empties the cache."""

    def limit(self, num_bytes: int) -> None:
        """Limits what the process may reserve."""


def mlp(num_samples: int) -> Workload:
    """The same shapes in every step; every tensor of the large pool but biases."""

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(6):
            layers += [nn.Linear(1024, 1024), nn.GELU()]
        return nn.Sequential(*layers)

    def loss(model: Any, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    return Workload(
        model=model,
        batch=lambda: torch.randn(num_samples, 1024),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    )


class Sentences(nn.Module):
    """A transformer over tokens; logits for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8192, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 8192)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.tokens(tokens)))
        return out


def transformer(num_tokens: int) -> Workload:
    """One shape per length of the sentences."""

    def loss(model: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return Workload(
        model=Sentences,
        batch=lambda: torch.randint(8192, (8, num_tokens)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    )


# -- programs ----------------------------------------------------------------------------------------------------------


def _static_mlp(marks: Marks, device: str) -> None:
    _train(mlp, MLP_BATCHES, marks, device)


def _variable_transformer(marks: Marks, device: str) -> None:
    _train(transformer, SENTENCE_LENGTHS, marks, device)


def _train(workload: Callable[[int], Workload], sizes: tuple[int, ...], marks: Marks, device: str) -> None:
    torch.manual_seed(0)
    first = workload(sizes[0])
    model = first.make_model().to(device)
    optimizer = first.make_optimizer(model)
    for number, size in enumerate(sizes):
        marks.phase(f"step {number}")
        run = workload(size)
        batch = run.make_batch().to(device)
        run.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del batch
        if number == 0:
            marks.empty_cache()


@torch.no_grad()
def _cross_stream(marks: Marks, device: str) -> None:
    """Batches come in and results go out on a stream of their own, as a prefetcher and an offloader do it."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    host = torch.randn(2048, 2048).pin_memory()
    layer = nn.Linear(2048, 2048).to(device)
    results = []
    for number in range(12):
        marks.phase(f"step {number}")
        rows = 512 * (1 + number % 4)
        with torch.cuda.stream(side):
            batch = host[:rows].to(device, non_blocking=True)
        main.wait_stream(side)
        batch.record_stream(main)
        found = layer(batch).relu()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            results.append(found.to("cpu", non_blocking=True))
        found.record_stream(side)
        del batch, found
        if number == 8:
            torch.cuda.synchronize()
            marks.empty_cache()
    torch.cuda.synchronize()


def _out_of_memory(marks: Marks, device: str) -> None:
    """A block that another stream keeps comes back too late for the request that waited for it.

    Then cached blocks are given back to make room, then nothing is left to give, then a smaller request fits.
    """
    marks.limit(ONE_SEGMENT_BYTES)
    first, middle, last = (_bytes(size, device) for size in SEGMENT_MIB)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
    middle.record_stream(side)
    del middle
    _expect_out_of_memory(SEGMENT_MIB[1], device)
    middle = _bytes(SEGMENT_MIB[1], device)
    marks.limit(LIMIT_BYTES)
    held = [_bytes(20 * (1 + number % 3), device) for number in range(9)]
    del held[::2]
    held.append(_bytes(230, device))
    _expect_out_of_memory(LIMIT_BYTES // MIB, device)
    held += [_bytes(3, device), first, middle, last]


def _expect_out_of_memory(num_mib: int, device: str) -> None:
    try:
        _bytes(num_mib, device)
    except torch.cuda.OutOfMemoryError:
        return
    raise AssertionError(f"a request of {num_mib} MiB was granted above the limit")


def _bytes(num_mib: int, device: str) -> Tensor:
    return torch.empty(num_mib * MIB, dtype=torch.uint8, device=device)


PROGRAMS: dict[str, Callable[[Marks, str], None]] = {
    "static-mlp": _static_mlp,
    "variable-transformer": _variable_transformer,
    "cross-stream": _cross_stream,
    "out-of-memory": _out_of_memory,
}
