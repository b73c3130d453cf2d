"""Writes the figures of each training step where other tools read them: JSON lines, Prometheus, or TensorBoard."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec

from memwall.errors import UsageError
from memwall.machine.launched import launched
from memwall.observe.rank_spread import rank_file_name
from memwall.session.watch.step_metrics import StepMetrics

_log = logging.getLogger(__name__)


class MetricsFile(Protocol):
    """Takes the figures of steps."""

    def write(self, metrics: StepMetrics) -> None:
        """Adds those of a step."""

    def close(self) -> None:
        """Ends the file."""


def open_metrics(path: Path, *, appends: bool = False) -> MetricsFile:
    """Opens a file for the figures of steps, of the kind that its name says; of several ranks each has one of its own.

    A name that ends in `.prom` is a text file for Prometheus' node exporter, with the last step; a folder is one of
    TensorBoard's; all others are JSON lines, one object a step. A write that fails later ends the figures with a
    warning, and not the training.

    Args:
        path: where; other ranks are given the same.
        appends: keep the steps that are there, of the run that this one continues.

    Raises:
        UsageError: it cannot be written, or a library is missing.
    """
    is_folder, own = path.is_dir(), path.with_name(rank_file_name(path.name))
    try:
        if is_folder:
            if own != path:
                own = path / f"rank{launched().rank}"
                own.mkdir(exist_ok=True)
            return _Guarded(own, _TensorBoard(own))
        return _Guarded(own, _Prometheus(own) if path.suffix == ".prom" else _JsonLines(own, appends=appends))
    except OSError as error:
        raise UsageError(f"--metrics {path}: cannot be written: {error.strerror or error}") from error


class _Guarded:
    """Ends the figures where they can no longer be written."""

    def __init__(self, path: Path, file: MetricsFile) -> None:
        self._path, self._file = path, file
        self._has_failed = False

    def write(self, metrics: StepMetrics) -> None:
        self._try(lambda: self._file.write(metrics))

    def close(self) -> None:
        self._try(self._file.close)

    def _try(self, do: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            do()
        except OSError as error:
            self._has_failed = True
            _log.warning("--metrics %s: %s; it gets no further steps", self._path, error.strerror or error)


class _JsonLines:
    """Writes one object a line, each whole once it is there: `memwall top` reads on while the run goes on."""

    def __init__(self, path: Path, *, appends: bool) -> None:
        self._file: TextIO = path.open("a" if appends else "w")

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(msgspec.json.encode(metrics).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Prometheus:
    """Writes the last step in base units, whole each time (https://prometheus.io/docs/instrumenting/exposition_formats)."""

    def __init__(self, path: Path) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
        except ImportError as error:
            raise UsageError(_missing(path, "prometheus-client")) from error
        self._write = write_to_textfile
        self._path, self._registry, self._gauge = path, CollectorRegistry(), Gauge
        self._gauges: dict[str, Any] = {}
        path.touch()

    def write(self, metrics: StepMetrics) -> None:
        for name, value in _figures(metrics).items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(f"memwall_{name}", _WORDS[name], registry=self._registry)
            self._gauges[name].set(value)
        self._write(str(self._path), self._registry)

    def close(self) -> None:
        """Leaves the last step there."""


class _TensorBoard:
    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise UsageError(_missing(path, "tensorboard")) from error
        if not os.access(path, os.W_OK):
            raise UsageError(f"--metrics {path}: cannot be written: no permission to")
        self._writer: Any = SummaryWriter(str(path))

    def write(self, metrics: StepMetrics) -> None:
        for name, value in _figures(metrics).items():
            self._writer.add_scalar(f"memwall/{name}", value, metrics.step, walltime=metrics.unix_seconds)

    def close(self) -> None:
        self._writer.close()


_WORDS = {
    "step": "Training steps so far",
    "step_seconds": "Seconds of the last step that was timed",
    "peak_bytes": "The most that the process held in the last step",
    "budget_bytes": "What the process may hold",
    "forecast_bytes": "The most that the plan foresees of a step",
    "bytes_to_tier": "Bytes that the last step moved to the next tier",
    "bytes_from_tier": "Bytes that the last step fetched back",
    "num_actions": "Actions of the plan in effect",
    "num_replans": "Plans that were made again",
    "oom_recoveries": "Steps that were done again after memory ran out",
}


def _figures(metrics: StepMetrics) -> dict[str, float]:
    """Returns the numbers of a step by name, without those that are not known."""
    values = ((name, getattr(metrics, name)) for name in _WORDS)
    return {name: value for name, value in values if value is not None}


def _missing(path: Path, library: str) -> str:
    return f"--metrics {path}: needs {library}, which is not installed: pip install 'torch-memwall[metrics]'"
