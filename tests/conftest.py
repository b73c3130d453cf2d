"""What every test gets: a fixed terminal width, its environment restored, and one way to say what it requires."""

import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from phantom_processes import is_phantom, pytest_runtest_protocol

if TYPE_CHECKING:
    from memwall.patches import InEffect

__all__ = ["pytest_runtest_protocol"]

# On a busy machine an example may take long: how long is the subject of none of these tests.
settings.register_profile("memwall", deadline=None)
settings.load_profile("memwall")


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Text as on an 80-column terminal without colours; environment variables are put back afterwards."""
    before = dict(os.environ)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _nothing_left_changed(request: pytest.FixtureRequest, _restored_environment: None) -> Iterator[None]:
    """Whatever memwall changes on objects that are not its own, a test has taken back when it ends.

    Marked `leaves_changed`, it may leave them, as a script may that ends with its parameters on disk; the book of
    changes forgets them then, so that no later test is blamed.
    """
    before = {change.number for change in _changes()}
    yield
    left = _changes(before)
    if left:
        gc.collect()  # a change of an object ends with it
        left = _changes(before)
    if left and request.node.get_closest_marker("leaves_changed") is not None:
        for change in left:
            sys.modules["memwall.patches"]._active.pop(change.number, None)
        left = []
    if left:
        gc.unfreeze()  # a commit looks at what is frozen, and freezes what is there then
        _hide_what_lives()
        left = _changes(before)
    elif len(sys.modules) > _hidden_modules[-1] + 100:
        _hide_what_lives()
    assert not left, "left changed:\n" + "\n".join(f"{one.what} {one.where}: {one.why}" for one in left)


def _changes(before: Collection[int] = ()) -> "list[InEffect]":
    """Lists what has to be taken back, but for what was there before; nothing without memwall's book of changes."""
    patches = sys.modules.get("memwall.patches")
    found = [] if patches is None else patches.active()
    return [change for change in found if not change.permanent and change.number not in before]


_hidden_modules = [0]
"""How many modules were imported each time that what lives was hidden."""


def _hide_what_lives() -> None:
    """Hides it from the garbage collector: a full pass over torch's objects takes a fifth of a second."""
    gc.collect()
    gc.freeze()
    _hidden_modules.append(len(sys.modules))


@pytest.fixture(scope="module", autouse=True)
def _collects_little() -> Iterator[None]:
    """Begins a file with little for the garbage collector to look through.

    A commit, which would count it, bring it back and look through it, takes it for nothing: to count it alone takes a
    tenth of a second.
    """
    _hide_what_lives()
    discovery = sys.modules.get("memwall.checkpoint.discovery")
    if discovery is None:
        yield
        return
    seen = vars(gc) | {"get_freeze_count": lambda: 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "gc", SimpleNamespace(**seen))
        yield


@pytest.fixture
def freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has memwall see what is frozen, in a test that freezes itself: `_collects_little` says that nothing is."""
    monkeypatch.setattr("memwall.checkpoint.discovery.gc", gc)
    gc.unfreeze()
    yield
    _hide_what_lives()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Makes a process group of this process alone, over gloo, which ends when what the test made is gone.

    In a test's own frame the group would end before a DistributedDataParallel there. Its reducer then holds the group
    last, and waits, with the interpreter locked, for a thread of gloo that needs the lock to give a tensor back: one
    run in a hundred never ends (torch 2.13, no part of memwall's).
    """
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors, which gain nothing from a second thread and wait for it when the machine is busy."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step finds no room for gradients."""
    parameters, state = "memwall.apply.streaming.parameter_keeper", "memwall.apply.optimizer_state.state_keeper"
    monkeypatch.setattr(f"{parameters}.lacks_room", lambda *_: True)
    monkeypatch.setattr(f"{parameters}.MIN_PARAMETER_BYTES", 4 << 10)
    monkeypatch.setattr(f"{parameters}.parameter_window_bytes", lambda _: 16 << 10)
    monkeypatch.setattr(f"{state}.MIN_STATE_BYTES", 4 << 10)
    monkeypatch.setattr("memwall.session.recorded_step.MIN_STATE_BYTES", 4 << 10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what cannot run here, each with its reason; the slowest files begin, so that none is left last."""
    seconds: Counter[Path] = Counter()
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is not None:
            seconds[item.path] += slow.kwargs.get("seconds", 1)
    items.sort(key=lambda item: -seconds[item.path])
    for item in items:
        missing = [
            name
            for mark in item.iter_markers("requires")
            for name in mark.args
            if importlib.util.find_spec(name) is None
        ]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
        # With both marks a test runs on a real device as well, where the settings say nothing.
        if item.get_closest_marker("gpu") is not None:
            if not _has_gpu():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("phantom") is not None and not is_phantom():
            item.add_marker(pytest.mark.skip(reason="needs the phantom device: make test-phantom"))


def _has_gpu() -> bool:
    import torch

    # A phantom device is left untouched here: each test has settings of its own.
    return is_phantom() or torch.cuda.is_available()
