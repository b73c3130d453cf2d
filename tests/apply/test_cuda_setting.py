"""The CUDA allocator's setting string: in effect before CUDA starts, or a refusal that says what to do."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import torch

from memwall.apply.memory import cuda_setting
from memwall.apply.memory.cuda_setting import effective_setting, lint_variables, require_cuda_setting, restore_variables
from memwall.errors import ApplyError
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.torch_internals import allocator

SETTING = "expandable_segments:False,large_segment_size_mb:20,max_split_size_mb:64"
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PROFILE, _ = profile_for("2.13.0")


class Torch:
    """What stands in for torch's own settings: it reads the environment once, when it is first asked."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.calls: list[str] = []
        self.refuses = ""
        self.in_force: dict[str, object] = {"expandable_segments": False, "garbage_collection_threshold": 0.0}
        """What the allocator itself runs with, once CUDA does."""

    def get(self) -> str:
        if self.text is None:
            self.text = os.environ.get(NAMES[1]) or os.environ.get(NAMES[0]) or ""
        return self.text

    def set(self, text: str) -> None:
        self.calls.append(text)
        self.text = text
        if text == self.refuses:
            raise ValueError("no")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    found = Torch()
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator, "_get_settings", found.get)
    monkeypatch.setattr(cuda_setting, "set_settings", found.set)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(cuda_setting, "snapshot_of_allocator", lambda: {"allocator_settings": found.in_force})
    yield found
    restore_variables()


def test_the_environment_is_given_back_as_it_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], SETTING)  # the user's own
    require_cuda_setting(SETTING)
    require_cuda_setting(SETTING)
    restore_variables()
    assert [os.environ.get(name) for name in NAMES] == [SETTING, None]


def test_both_variables_are_set_and_what_torch_took_is_read_back_and_logged(
    settings: Torch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memwall.apply.memory.cuda_setting"):
        require_cuda_setting(SETTING)
    assert [os.environ[name] for name in NAMES] == [SETTING, SETTING]
    assert (effective_setting(), settings.calls) == (SETTING, [])
    assert noted(caplog) == [f"in effect: {SETTING}"]


def noted(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged; each line begins with the time, to the second."""
    lines = [message.split(": CUDA allocator settings ") for message in caplog.messages]
    now = datetime.now(UTC)
    assert all(abs(datetime.fromisoformat(time) - now) < timedelta(minutes=1) for time, _ in lines)
    return [text for _, text in lines]


def test_where_torch_has_read_the_environment_already_its_setter_is_called(settings: Torch) -> None:
    assert effective_setting() == ""
    require_cuda_setting(SETTING)
    assert (effective_setting(), settings.calls) == (SETTING, [SETTING])


def test_after_a_refusal_the_previous_complete_string_is_sent_again(
    settings: Torch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused string has been half applied; defaults cannot be left to the empty string, which keeps what sticks."""
    effective_setting()
    settings.refuses = SETTING
    with (
        caplog.at_level(logging.INFO, "memwall.apply.memory.cuda_setting"),
        pytest.raises(ApplyError, match=f"torch refuses the allocator setting {SETTING}: no; '' stays"),
    ):
        require_cuda_setting(SETTING)
    default = "expandable_segments:False,large_segment_size_mb:20"
    assert settings.calls == [SETTING, default]
    assert not [name for name in NAMES if name in os.environ]
    assert noted(caplog) == [f"sent: {SETTING}", f"refused, sent again those before: {default}"]


def test_a_release_that_reads_nothing_back_gets_the_setting_and_a_warning(
    settings: Torch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocator, "_get_settings", None)
    require_cuda_setting(SETTING)
    assert (effective_setting(), settings.calls) == (SETTING, [SETTING])
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [f"the CUDA allocator's settings cannot be read back with torch {torch.__version__}"]


def test_a_string_that_torch_does_not_take_over_is_an_error(settings: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    effective_setting()
    monkeypatch.setattr(cuda_setting, "set_settings", settings.calls.append)
    with pytest.raises(ApplyError, match=f"torch took '' where the plan needs {SETTING}"):
        require_cuda_setting(SETTING)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("expandable_segments:true", "expected True or False, with a capital"),
        ("expandable_segments:True,max_split_size_mb:64", "lets reserved memory grow without bound"),
        ("max_split_size:64", "option 'max_split_size' is not known to torch"),
    ],
)
def test_a_setting_is_validated_before_anything_is_changed(setting: str, reason: str, settings: Torch) -> None:
    with pytest.raises(ApplyError, match="cannot be used with this torch") as error:
        require_cuda_setting(setting)
    assert reason in str(error.value)
    assert (settings.calls, [name for name in NAMES if name in os.environ]) == ([], [])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_already_is_enough_even_once_cuda_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv(name, SETTING)
    require_cuda_setting(SETTING)
    assert os.environ[name] == SETTING
    assert any(f"only {name} is set" in message for message in caplog.messages)


def test_under_rocm_the_variable_that_wins_is_set_and_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    require_cuda_setting(SETTING)
    assert os.environ["PYTORCH_HIP_ALLOC_CONF"] == SETTING
    restore_variables()
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ApplyError, match="the environment has PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"):
        require_cuda_setting(SETTING)
    (found,) = lint_variables(
        {**dict.fromkeys(NAMES, SETTING), "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:64"}, PROFILE
    )[:1]
    assert "PYTORCH_HIP_ALLOC_CONF=max_split_size_mb:64 is what torch for ROCm reads first" in found


def test_another_setting_of_the_user_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    with pytest.raises(ApplyError) as error:
        require_cuda_setting(SETTING)
    assert str(error.value) == (
        f"the plan needs PYTORCH_ALLOC_CONF={SETTING}, and the environment has "
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:32; unset PYTORCH_CUDA_ALLOC_CONF, or set it to what the plan needs"
    )
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:32"


def test_it_is_too_late_once_cuda_runs(monkeypatch: pytest.MonkeyPatch, settings: Torch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ApplyError, match="before CUDA starts, and it has started with ''; set PYTORCH_ALLOC_CONF and"):
        require_cuda_setting(SETTING)
    assert settings.calls == []


def test_an_option_that_the_running_allocator_ignores_is_found(
    monkeypatch: pytest.MonkeyPatch, settings: Torch
) -> None:
    """GIVEN a torch that takes the string and keeps its own way (pytorch 183387) THEN the plan is refused."""
    wanted = "expandable_segments:True,large_segment_size_mb:20"
    for name in NAMES:
        monkeypatch.setenv(name, wanted)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ApplyError, match="needs expandable_segments:True, and the allocator runs with False whatever"):
        require_cuda_setting(wanted)
    settings.in_force["expandable_segments"] = True
    require_cuda_setting(wanted)


def test_a_variable_that_torch_did_not_read_is_not_enough(monkeypatch: pytest.MonkeyPatch, settings: Torch) -> None:
    """GIVEN CUDA started before the variable was set THEN the environment says one thing and torch does another."""
    effective_setting()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", SETTING)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ApplyError, match="it has started with ''"):
        require_cuda_setting(SETTING)


# -- lint --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({NAMES[0]: SETTING, NAMES[1]: SETTING}, ()),
        ({}, ()),
        ({NAMES[0]: SETTING}, (f"only {NAMES[0]} is set", f"set {NAMES[1]} to the same value")),
        ({NAMES[1]: SETTING}, (f"only {NAMES[1]} is set", f"set {NAMES[0]} to the same value")),
        ({NAMES[0]: SETTING, NAMES[1]: "max_split_size_mb:32"}, ("they differ",)),
        (dict.fromkeys(NAMES, "garbage_collection_threshold:0.8"), ("does nothing without a memory limit",)),
        (dict.fromkeys(NAMES, "expandable_segments:True"), ("is not for runs with tensors shared", "gfx1201")),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ("nothing is cached",)),
        (dict.fromkeys(NAMES, "expandable_segments:true"), ("expected True or False, with a capital",)),
    ],
)
def test_what_is_doubtful_about_the_variables_is_told(environment: dict[str, str], words: tuple[str, ...]) -> None:
    text = " ".join(lint_variables(environment, PROFILE))
    assert bool(text) == bool(words)
    assert all(word in text for word in words)


@pytest.mark.slow
def test_the_installed_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import torch\n"
        "from memwall.apply.memory.cuda_setting import effective_setting, require_cuda_setting\n"
        "before = effective_setting()\n"
        f"require_cuda_setting({SETTING!r})\n"
        "print(repr(before), effective_setting())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"'' {SETTING}"
