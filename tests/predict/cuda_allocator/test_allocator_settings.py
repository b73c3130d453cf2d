"""The allocator's configuration string: what is read, refused and written back."""

import subprocess
import sys

import pytest

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_settings import (
    MIB,
    AllocatorSettings,
    divisions_text,
    format_settings,
    parse_settings,
    useless_options,
)
from memwall.predict.cuda_allocator.torch_releases import profile_for

NEW = profile_for("2.13.0")[0]
OLD = profile_for("2.11.0")[0]


def test_every_option_is_read() -> None:
    text = (
        "expandable_segments:False, large_segment_size_mb:64, max_split_size_mb:128, max_non_split_rounding_mb:70,"
        "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],"
        "per_process_memory_fraction:0.9,throw_on_cudamalloc_oom:True,pinned_use_background_threads:True"
    )
    assert parse_settings(text, NEW) == AllocatorSettings(
        large_segment_bytes=64 * MIB,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=70 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5,
        per_process_memory_fraction=0.9,
        throw_on_cudamalloc_oom=True,
        others=(("pinned_use_background_threads", "True"),),
    )


def test_nothing_given_is_the_default() -> None:
    assert parse_settings("", NEW) == AllocatorSettings()
    assert AllocatorSettings().slack_bytes == 20 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[64:8,256:4,1024:4,>:1]", (8,) * 7 + (0, 4, 0, 4) + (1,) * 5),
        ("4", (4,) * 16),
    ],
)
def test_r3_a_list_of_divisions_fills_the_intervals_as_torch_does(text: str, expected: tuple[int, ...]) -> None:
    settings = parse_settings(f"roundup_power2_divisions:{text}", NEW)
    assert settings.roundup_power2_divisions == expected


@pytest.mark.parametrize(
    "divisions",
    [(4,) * 16, (8, *(0,) * 15), (*(0,) * 15, 8), (1,) * 9 + (2, 4) + (8,) * 5, (0, 2, 0, 0, 4, *(0,) * 11)],
)
def test_divisions_are_written_so_that_they_read_back(divisions: tuple[int, ...]) -> None:
    text = divisions_text(divisions)
    assert parse_settings(f"roundup_power2_divisions:{text}", NEW).roundup_power2_divisions == divisions
    assert ">" not in text  # which a shell takes for a redirection


def test_the_written_string_is_complete() -> None:
    assert format_settings(AllocatorSettings()) == "expandable_segments:False,large_segment_size_mb:20"
    settings = AllocatorSettings(
        max_split_bytes=64 * MIB,
        max_non_split_rounding_bytes=32 * MIB,
        garbage_collection_threshold=0.6,
        per_process_memory_fraction=0.5,
        throw_on_cudamalloc_oom=True,
        others=(("pinned_use_background_threads", "True"),),
    )
    text = format_settings(settings)
    assert text == (
        "expandable_segments:False,large_segment_size_mb:20,max_split_size_mb:64,max_non_split_rounding_mb:32,"
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True,"
        "pinned_use_background_threads:True"
    )
    assert parse_settings(text, NEW) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "expandable_segments:True,max_split_size_mb:128",
            "expandable_segments:True together with max_split_size_mb:128 lets reserved memory grow without bound "
            "(pytorch 123548): drop one of the two",
            id="k1",
        ),
        (
            "max_split_size_mb:19",
            "max_split_size_mb:19 is below the large segment size of 20 MiB; torch refuses it: give 20 or more",
        ),
        (
            "max_split_size_mb:32,large_segment_size_mb:64",
            "max_split_size_mb:32 is below the large segment size of 64 MiB; torch refuses it: give 64 or more",
        ),
        (
            "max_non_split_rounding_mb:19",
            "max_non_split_rounding_mb:19 is below the large segment size of 20 MiB; torch refuses it: give 20 or more",
        ),
        ("large_segment_size_mb:10", "large_segment_size_mb:10: expected a whole number of MiB above 10"),
        ("max_split_size_mb:1.5", "max_split_size_mb:1.5: expected a whole number of MiB"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold:1.0: expected a number above 0 and below 1"),
        ("garbage_collection_threshold:x", "garbage_collection_threshold:x: expected a number above 0 and below 1"),
        ("per_process_memory_fraction:1.1", "per_process_memory_fraction:1.1: expected a number above 0 and up to 1"),
        ("expandable_segments:true", "expandable_segments:true: expected True or False, with a capital"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions: '3' is neither 0 nor a power of two"),
        (
            "roundup_power2_divisions:[100:2]",
            "roundup_power2_divisions:[100:2]: '100' is not a power of two, in MiB",
        ),
        (
            "roundup_power2_divisions:[4]",
            "roundup_power2_divisions:[4]: '4' is not of the form mebibytes:divisions",
        ),
        (
            "max_split_size_mb",
            "'max_split_size_mb' in 'max_split_size_mb' is not an allocator option; expected name:value",
        ),
        (
            "backend:cudaMallocAsync",
            "backend:cudaMallocAsync does not use PyTorch's own allocator, so there is nothing to simulate",
        ),
    ],
)
def test_what_is_wrong_or_dangerous_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(text, NEW)
    assert str(caught.value) == message


def test_an_option_of_a_later_release_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'throw_on_cudamalloc_oom' is not known to torch 2\.11; it knows backend, "):
        parse_settings("throw_on_cudamalloc_oom:True", OLD)


def test_settings_without_effect_are_pointed_out() -> None:
    assert useless_options(AllocatorSettings(garbage_collection_threshold=0.8)) == (
        "garbage_collection_threshold:0.8 does nothing without a memory limit; set one with "
        "torch.cuda.set_per_process_memory_fraction",
    )
    limited = AllocatorSettings(garbage_collection_threshold=0.8, per_process_memory_fraction=0.5)
    assert useless_options(limited) == useless_options(AllocatorSettings()) == ()


def test_an_unknown_release_gets_the_newest_profile_and_says_so() -> None:
    profile, note = profile_for("2.16.0")
    assert profile == profile_for("2.15.0")[0]
    assert note == "the allocator of torch 2.16.0 is not known here; modelled as that of 2.15"
    assert profile_for("2.15.0")[1] == ""
    assert profile_for("2.13.1+cu130") == (NEW, "")
    with pytest.raises(UsageError, match="'main' is not a torch version"):
        profile_for("main")
    with pytest.raises(UsageError, match=r"2\.6\.0 is not known here, and reads fewer settings than later ones; give"):
        profile_for("2.6.0")


@pytest.mark.slow
def test_the_installed_torch_refuses_the_same_strings() -> None:
    strings = [
        "max_split_size_mb:128",
        "expandable_segments:True",
        "large_segment_size_mb:64,max_split_size_mb:64",
        "large_segment_size_mb:64,max_split_size_mb:32",
        "garbage_collection_threshold:1.0",
        "max_split_size_mb:32,large_segment_size_mb:20",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "expandable_segments:true",
        "large_segment_size_mb:10",
        "max_non_split_rounding_mb:19",
        "max_non_split_rounding_mb:20",
        "expandable_segments:False,large_segment_size_mb:20",
    ]
    # Each in a process of its own: a call leaves options behind, also one that is refused.
    code = (
        "import os, sys, torch\n"
        "for text in sys.argv[1:]:\n"
        "    if not os.fork():\n"
        "        try:\n"
        "            torch._C._accelerator_setAllocatorSettings(text)\n"
        "        except Exception:\n"
        "            os._exit(1)\n"
        "        os._exit(0)\n"
        "    print('refused' if os.wait()[1] else 'taken', flush=True)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, *strings], capture_output=True, text=True, check=True, timeout=60
    )

    def verdict(text: str) -> str:
        try:
            parse_settings(text, NEW)
        except UsageError:
            return "refused"
        return "taken"

    assert dict(zip(strings, shown.stdout.split(), strict=True)) == {text: verdict(text) for text in strings}
