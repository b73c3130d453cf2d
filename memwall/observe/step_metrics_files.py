"""Writes the figures of each training step where other tools read them: JSON lines, Prometheus, or TensorBoard."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from memwall.errors import UsageError
from memwall.machine.launched import launched
from memwall.observe.rank_spread import rank_file_name
from memwall.session.watch.step_metrics import StepMetrics

_log = logging.getLogger(__name__)


def open_metrics(path: Path, *, appends: bool = False) -> "_Guarded":
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

    def __init__(self, path: Path, file: "_JsonLines | _Prometheus | _TensorBoard") -> None:
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
    """Writes the last step in base units, whole each time (https://prometheus.io/docs/instrumenting/exposition_formats).

    Counts are those since this process began, as counters are.
    """

    def __init__(self, path: Path) -> None:
        try:
            from prometheus_client import CollectorRegistry, write_to_textfile
        except ImportError as error:
            raise UsageError(_missing(path, "prometheus-client")) from error
        self._write, self._path, self._registry = write_to_textfile, path, CollectorRegistry()
        self._last: StepMetrics | None = None
        self._step_seconds: float | None = None
        self._moved = {"out": 0, "in": 0}
        self._registry.register(self)
        path.touch()

    def write(self, metrics: StepMetrics) -> None:
        self._last = metrics
        if metrics.step_seconds is not None:
            self._step_seconds = metrics.step_seconds
        self._moved["out"] += metrics.bytes_to_tier
        self._moved["in"] += metrics.bytes_from_tier
        self._write(str(self._path), self._registry)

    def collect(self) -> Iterator[Any]:
        """Yields the families of the last step, as the library asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        last = self._last
        if last is None:
            return
        gauges: dict[str, tuple[str, dict[str, float | None]]] = {
            "memory_peak_bytes": ("The most that the process held in the last step", {"": last.peak_bytes}),
            "memory_predicted_peak_bytes": ("The most that the plan foresees of a step", {"": last.forecast_bytes}),
            "memory_predicted_bytes": (
                "Tensors where the plan foresees most of them, by category",
                {**last.forecast_by_category},
            ),
            "memory_budget_bytes": ("What the process may hold", {"": last.budget_bytes}),
        }
        for name, (words, values) in gauges.items():
            labels = ["device", "category"] if name == "memory_predicted_bytes" else ["device"]
            family = GaugeMetricFamily(f"memwall_{name}", words, labels=labels)
            for category, value in values.items():
                if value is not None:
                    family.add_metric([last.device, category][: len(labels)], value)
            yield family
        error = last.forecast_bytes / last.peak_bytes - 1 if last.forecast_bytes and last.peak_bytes else None
        plain = {
            "prediction_error_ratio": ("By what part of it the forecast is above what was held", error),
            "step_seconds": ("Seconds of the last step that was timed", self._step_seconds),
            "plan_actions": ("Actions of the plan in effect", last.num_actions),
        }
        for name, (words, value) in plain.items():
            if value is not None:
                yield GaugeMetricFamily(f"memwall_{name}", words, value=value)
        counts = {
            "steps": ("Training steps", last.step),
            "replans": ("Plans that were made again", last.num_replans),
            "oom_recoveries": ("Steps that were done again after memory ran out", last.oom_recoveries),
            "alloc_retries": ("Requests granted after the allocator's cache was given back", last.num_alloc_retries),
        }
        for name, (words, count) in counts.items():
            if count is not None:
                yield CounterMetricFamily(f"memwall_{name}", words, value=count)
        moved = CounterMetricFamily(
            "memwall_offload_bytes", "Bytes moved to the next tier, and back", labels=["direction"]
        )
        for direction, num_bytes in self._moved.items():
            moved.add_metric([direction], num_bytes)
        yield moved

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
        for name, value in (*_figures(metrics), *_of_device(metrics)):
            self._writer.add_scalar(name, value, metrics.step, walltime=metrics.unix_seconds)

    def close(self) -> None:
        self._writer.close()


_SCALARS = (
    "step_seconds",
    "peak_bytes",
    "budget_bytes",
    "forecast_bytes",
    "bytes_to_tier",
    "bytes_from_tier",
    "num_actions",
    "num_replans",
    "oom_recoveries",
)


def _figures(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a step by name, without those that are not known."""
    for name in _SCALARS:
        if (value := getattr(metrics, name)) is not None:
            yield f"memwall/{name}", value
    for category, num_bytes in metrics.forecast_by_category.items():
        yield f"memwall/forecast/{category}_bytes", num_bytes


def _of_device(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    """Yields what torchtitan writes of a CUDA device, under its names, so that dashboards of the one show the other."""
    if metrics.active_bytes is None or metrics.reserved_bytes is None or not metrics.device_bytes:
        return
    for name, num_bytes in (("active", metrics.active_bytes), ("reserved", metrics.reserved_bytes)):
        yield f"memory/max_{name}(GiB)", num_bytes / 2**30
        yield f"memory/max_{name}(%)", 100 * num_bytes / metrics.device_bytes
    yield "memory/num_alloc_retries", float(metrics.num_alloc_retries or 0)
    yield "memory/num_ooms", float(metrics.oom_recoveries)


def _missing(path: Path, library: str) -> str:
    return f"--metrics {path}: needs {library}, which is not installed: pip install 'torch-memwall[metrics]'"
