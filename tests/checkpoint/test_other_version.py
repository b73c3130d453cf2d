"""A step that another version of memwall, or another release of torch, has committed: read, or refused with who can."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from checkpoint_runs import Script, failure_of, run

from memwall.checkpoint.committed import Committed, Content
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.checkpoint.training_state import encode_objects
from memwall.errors import StoreError


def restoration(content: bytes) -> Restoration:
    """GIVEN a journal in DIR whose fourth step has this content."""
    journal, found = SimpleNamespace(directory="DIR"), SimpleNamespace(step=4, content=content, buckets=())
    return Restoration([Committed(cast(Any, journal), cast(Any, found))])


def test_a_plan_of_another_version() -> None:
    content = Content(tensors=(), objects=encode_objects({"helpers": []}), plan=b'{"schema": "memwall.plan/1"}')
    with pytest.raises(StoreError) as error:
        _ = restoration(msgspec.msgpack.encode(content)).plan
    assert str(error.value).startswith("step 4 in DIR was committed by another version of memwall (")
    assert str(error.value).endswith("); resume with the one that wrote it")


def test_content_of_another_version() -> None:
    with pytest.raises(StoreError, match="step 4 in DIR was committed by another version of memwall"):
        restoration(msgspec.msgpack.encode({"tensors": 1}))


BOTH = f"it was committed under torch {torch.__version__}, and this is torch 2.99.0"


def under_another_release(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """GIVEN a run that was interrupted WHEN it is to go on under another release of torch."""
    run(lambda: Script(stop_in=2), StepCheckpoint(directory))
    monkeypatch.setattr(torch, "__version__", "2.99.0")


def test_a_step_of_another_release_of_torch_is_continued_and_both_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(Script).result[1]
    under_another_release(monkeypatch, tmp_path)
    resumed = run(Script, StepCheckpoint(tmp_path, is_resuming=True)).result[1]
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert f"the run continues from step 2 of {tmp_path}: {BOTH}; it goes on" in caplog.text


def test_nothing_is_said_of_the_same_release(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(lambda: Script(stop_in=2), StepCheckpoint(tmp_path))
    run(Script, StepCheckpoint(tmp_path, is_resuming=True))
    assert "torch" not in caplog.text


def test_what_a_release_of_torch_cannot_load_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("_is_initial")

    under_another_release(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.optim.lr_scheduler.CosineAnnealingLR, "load_state_dict", fails)
    assert str(failure_of(Script, StepCheckpoint(tmp_path, is_resuming=True))) == (
        f"step 2 in {tmp_path} cannot be continued from: {BOTH}, which cannot load the state of schedulers and scalers "
        "(KeyError: '_is_initial'); resume with that release"
    )


def test_another_model_under_another_release_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_another_release(monkeypatch, tmp_path)
    said = str(failure_of(lambda: Script(width=32), StepCheckpoint(tmp_path, is_resuming=True)))
    assert f"resume with the script that made it, and the release of torch: {BOTH}" in said
