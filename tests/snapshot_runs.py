"""Runs whose snapshots are analysed: a training step, and how a raw snapshot is read."""

import pickle
from collections.abc import Callable
from pathlib import Path

from cuda_history import MIB, History, frame

from memwall.predict.snapshot.analysis import DeviceAnalysis
from memwall.predict.snapshot.timeline import Timeline
from memwall.trace.snapshot.read import load_snapshot
from memwall.trace.snapshot.records import Snapshot

__all__ = ["KERNEL", "LINEAR", "MODEL", "TRAIN", "Explained", "imported", "training_step"]

TRAIN = frame("/home/me/work/train.py", 42, "step")
MODEL = frame("/home/me/work/model.py", 7, "forward")
LINEAR = frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")
KERNEL = frame("/pytorch/aten/src/ATen/native/cuda/Linear.cpp", 0, "at::linear")

Explained = Callable[[History], tuple[DeviceAnalysis, Timeline]]


def imported(raw: object, folder: Path) -> Snapshot:
    file = folder / "snapshot.pickle"
    file.write_bytes(pickle.dumps(raw))
    return load_snapshot(file)


def training_step() -> History:
    """20 MiB for two layers, 2 MiB for small tensors, then a 30 MiB segment of which 28 are used at the peak."""
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB, [KERNEL, LINEAR, MODEL, TRAIN])
    history.alloc(8 * MIB, 8 * MIB, 8 * MIB, [LINEAR, MODEL, TRAIN])
    history.segment(100 * MIB, 2 * MIB, "small")
    history.alloc(100 * MIB, 100, 512, [TRAIN])
    history.segment(200 * MIB, 30 * MIB)
    history.alloc(200 * MIB, 28 * MIB, 28 * MIB, [TRAIN])
    history.free(0)
    history.free(200 * MIB)
    return history
