"""Trains a case of the zoo on the phantom device and counts each phase of its run: build, steps, evaluation and files.

Two processes do it, since what a run leaves behind, as workspaces of cuBLAS, is not there when another one resumes it.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_truth_case import NUM_STEADY, SAMPLES_FACTOR, as_with_values, peaks_now, train_step
from phantom_forecast import PHASES
from prediction_zoo import FAMILIES, OPTIMIZERS, workload

__all__ = ["counted_phases"]

Peaks = dict[str, int]
Forked = Callable[[Callable[[], Any]], Any]


def counted_phases(case: tuple[str, ...], forked: Forked) -> dict[str, Any]:
    """Returns the peaks of each phase of a run by torch's allocator, or how that failed; see `PHASES`.

    Args:
        case: family, precision and optimizer.
        forked: returns what a function makes of its work in a process of its own, with `failure` where that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.pt")
        trained = forked(partial(_trained, case, file))
        if "failure" in trained:
            return dict(trained)
        resumed = forked(partial(_resumed, case, file))
        return {phase: trained[phase] for phase in PHASES if phase in trained} | dict(resumed)


@contextmanager
def _on_the_device() -> Iterator[None]:
    with as_with_values():
        yield
    torch.cuda.synchronize()


def _built(case: tuple[str, ...]) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer, Peaks]:
    family, precision, optimizer = case
    run = workload(family, optimizer, precision, SAMPLES_FACTOR * FAMILIES[family].num_samples)  # type: ignore[arg-type]
    model = run.make_model()
    torch.cuda.reset_peak_memory_stats()
    model = model.to("cuda")
    return run, model, OPTIMIZERS[optimizer](model.parameters()), peaks_now()


def _trained(case: tuple[str, ...], file: Path) -> dict[str, Peaks]:
    """Builds, trains, evaluates a batch between two steps, and saves model and optimizer."""
    with _on_the_device():
        run, model, optimizer, built = _built(case)
        batch = _moved(run.make_batch())
        steps = [train_step(case, model, optimizer, batch) for _ in range(1 + NUM_STEADY)]
        torch.cuda.reset_peak_memory_stats()
        _evaluate(case, model, _moved(run.make_batch()))
        evaluated = peaks_now()
        model.train()
        # What the evaluation leaves cached, a step finds: the phase reserves what both of them have reserved.
        after = [train_step(case, model, optimizer, batch) for _ in range(NUM_STEADY)]
        evaluated["reserved_bytes"] = max(peak["reserved_bytes"] for peak in (evaluated, *after))
        torch.cuda.reset_peak_memory_stats()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved = peaks_now()
    return {
        "build": built,
        "first": steps[0],
        "steady": {name: max(peak[name] for peak in steps[1:]) for name in steps[0]},
        "eval": evaluated,
        "save": saved,
    }


def _resumed(case: tuple[str, ...], file: Path) -> dict[str, Peaks]:
    """Builds anew and loads what was saved, by way of host memory."""
    with _on_the_device():
        _, model, optimizer, _ = _built(case)
        found = torch.load(file, map_location="cpu")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        return {"resume": peaks_now()}


def _evaluate(case: tuple[str, ...], model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    family, precision, _ = case
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast-bfloat16"):
        FAMILIES[family].loss(model, batch)


def _moved(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to("cuda") for name, value in batch.items()}
