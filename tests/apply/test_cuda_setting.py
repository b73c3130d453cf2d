"""The CUDA allocator's setting string: in the environment before CUDA starts, or a refusal that says what to do."""

import os

import pytest
import torch

from memwall.apply.cuda_setting import require_cuda_setting
from memwall.errors import ApplyError

SETTING = "expandable_segments:True,garbage_collection_threshold:0.8"


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_it_is_set_where_cuda_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    require_cuda_setting(SETTING)
    assert os.environ["PYTORCH_ALLOC_CONF"] == SETTING


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_is_set_already_is_enough_even_once_cuda_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv(name, SETTING)
    require_cuda_setting(SETTING)
    assert os.environ[name] == SETTING


def test_another_setting_of_the_user_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with pytest.raises(ApplyError) as error:
        require_cuda_setting(SETTING)
    assert str(error.value) == (
        f"the plan needs PYTORCH_ALLOC_CONF={SETTING}, and the environment has "
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64; unset PYTORCH_CUDA_ALLOC_CONF, or set it to what the plan needs"
    )
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_it_is_too_late_once_cuda_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ApplyError, match="before CUDA starts, and it has started; set the variable for the whole"):
        require_cuda_setting(SETTING)
