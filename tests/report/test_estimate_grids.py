"""The allocator's settings in words: the winner beside the default and the bound, for whom, and for whom not."""

from typing import Any

import pytest
from msgspec.structs import replace

from memwall.planning.forecast import Forecast, PeakBytes
from memwall.predict.cuda_allocator.advice import EXPANDABLE_GUARDS, AllocatorAdvice
from memwall.report.estimate_grids import allocator_facts, route_row, workload_row
from memwall.trace.workload_facts import WorkloadFacts

GIB = 1 << 30
BEST = "expandable_segments:True,large_segment_size_mb:20"
OTHER = "expandable_segments:False,large_segment_size_mb:20,max_split_size_mb:64"


@pytest.fixture
def advice() -> AllocatorAdvice:
    return AllocatorAdvice(
        settings=BEST,
        reserved_bytes=6 * GIB,
        reserved_spread_bytes=(6 * GIB, 6 * GIB),
        default_reserved_bytes=8 * GIB,
        lower_bound_bytes=5 * GIB,
        guards=EXPANDABLE_GUARDS,
        guarded_settings=OTHER,
        guarded_reserved_bytes=7 * GIB,
        torch_versions="simulated for torch 2.13 and later; the string is read by 2.11 and later",
        num_tried=40,
        notes=(),
    )


def test_the_winner_stands_beside_the_default_and_the_bound(advice: AllocatorAdvice) -> None:
    facts = dict(allocator_facts(advice))
    assert facts["allocator settings (L2 what-if)"] == (
        f"{BEST}: 6.00 GiB reserved; default 8.00 GiB, lower bound 5.00 GiB"
    )
    assert facts["set both to it"] == (
        "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF; simulated for torch 2.13 and later; the string is read by "
        "2.11 and later"
    )


def test_whoever_may_not_use_it_is_named_with_what_is_left(advice: AllocatorAdvice) -> None:
    text = dict(allocator_facts(advice))["not for runs with"]
    assert all(guard in text for guard in EXPANDABLE_GUARDS)
    assert text.endswith(f"For these {OTHER}: 7.00 GiB reserved")
    nothing = replace(advice, guarded_reserved_bytes=8 * GIB)
    assert dict(allocator_facts(nothing))["not for runs with"].endswith("For these the default is best")


def test_the_spread_is_shown_where_there_is_any(advice: AllocatorAdvice) -> None:
    shown = replace(advice, reserved_spread_bytes=(5 * GIB, 7 * GIB))
    facts = dict(allocator_facts(shown))
    assert "6.00 GiB (5.00 GiB to 7.00 GiB) reserved" in facts["allocator settings (L2 what-if)"]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "weights in bfloat16; AdamW; batch 4 x 2,048 tokens"),
        ({"autocast": "float16"}, "weights in bfloat16; float16 autocast; AdamW; batch 4 x 2,048 tokens"),
        ({"input_shape": (4, 3, 8, 8), "tokens_per_sample": None}, "weights in bfloat16; AdamW; batch 4 x 3 x 8 x 8"),
        ({"dtype": "", "input_shape": (), "tokens_per_sample": None}, "AdamW"),
    ],
)
def test_the_training_step_is_told_in_one_row(facts: dict[str, Any], text: str) -> None:
    workload = WorkloadFacts(
        dtype="bfloat16",
        autocast="none",
        optimizer="AdamW",
        micro_batch=4,
        num_micro_batches=1,
        input_shape=(4, 2048),
        tokens_per_sample=2048,
    )
    assert workload_row(replace(workload, **facts)) == (("workload", text),)
    assert workload_row(None) == ()


def test_where_the_default_is_as_good_only_that_is_said(advice: AllocatorAdvice) -> None:
    (fact,) = allocator_facts(replace(advice, reserved_bytes=8 * GIB))
    assert fact[1] == ("the default: none of 40 reserves notably less; default 8.00 GiB, lower bound 5.00 GiB")
    assert allocator_facts(None) == ()


@pytest.mark.parametrize(
    ("product", "source", "is_advised"),
    [
        ("NVIDIA L4 24GB", "fake", True),
        ("NVIDIA L4 24GB", "recorded", False),
        ("AMD Instinct MI300X 192GB", "fake", False),
        ("", "fake", False),
    ],
)
def test_the_phantom_is_advised_only_where_it_is_not_refused(product: str, source: Any, is_advised: bool) -> None:
    forecast = Forecast(
        device="cuda",
        source=source,
        route="translate",
        fits=True,
        budget_bytes=GIB,
        margin_bytes=0,
        peak=PeakBytes(allocated_bytes=1, process_bytes=1),
        phases={},
        step_seconds=None,
        not_modelled=(),
    )
    ((name, shown),) = route_row(forecast, product)
    assert (name, "--route phantom" in shown) == ("route", is_advised)
