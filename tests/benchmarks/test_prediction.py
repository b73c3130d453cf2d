"""The prediction benchmark: its arithmetic by hand, nothing fitted on what it is judged by, and what it published."""

import csv
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import prediction
import prediction_metrics as metrics
import pytest
from prediction_arms import measured, two_probes
from prediction_external import external_tables
from prediction_runs import ALLOCATOR, Run, file_sha256, read_runs
from prediction_truth import truth_tables
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, workload

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.torch_releases import profile_for

MIB = 1 << 20

# -- metrics -----------------------------------------------------------------------------------------------------------


def test_an_error_is_signed_and_relative_to_the_truth() -> None:
    assert metrics.signed_errors([90, 110, 100], [100, 100, 100]) == pytest.approx([-0.1, 0.1, 0.0])


def test_quantiles_are_of_the_magnitude_and_the_worst_keeps_its_sign() -> None:
    predicted = [100.0] * 18 + [70.0, 110.0]
    found = metrics.summary(predicted, [100.0] * 20)
    assert found["worst"] == pytest.approx(-0.3)
    assert found["median"] == 0.0
    assert found["mean"] == pytest.approx(0.02)
    assert found["p95"] == pytest.approx(0.1 + 0.05 * (0.3 - 0.1))  # between the 19th and the 20th of 20
    assert found["under_share"] == pytest.approx(0.05)
    assert found["within_10_percent_share"] == pytest.approx(0.95)
    assert found["median_waste_bytes"] == 0.0


def test_few_rows_show_themselves_and_no_percentages() -> None:
    found = metrics.summary([90.0, 120.0], [100.0, 100.0])
    assert found == {"num_rows": 2, "worst": pytest.approx(0.2), "errors": pytest.approx([-0.1, 0.2])}


def test_a_fit_is_false_where_the_run_needs_more_than_prediction_and_margin() -> None:
    predicted, true = [100.0, 100.0, 100.0, 100.0], [99.0, 104.0, 106.0, 121.0]
    assert metrics.false_fit_share(predicted, true, 0.0) == 0.75
    assert metrics.false_fit_share(predicted, true, 0.05) == 0.5
    assert metrics.false_fit_share(predicted, true, 0.2) == 0.25


def test_a_run_that_its_cap_kills_saves_nothing() -> None:
    assert metrics.memory_saved_share([30.0, 30.0], [20.0, 40.0], device_bytes=100.0, margin=0.0) == pytest.approx(0.35)


def test_verdicts_are_counted_by_what_was_said_and_what_was_true() -> None:
    found = metrics.verdicts([90.0, 95.0, 80.0, 120.0], [80.0, 80.0, 120.0, 120.0], device_bytes=100.0, margin=0.1)
    assert found == {"fits_said_fits": 1, "fits_said_not": 1, "not_said_fits": 1, "not_said_not": 1}


def test_two_probes_are_a_line_in_samples() -> None:
    assert two_probes((2, 4), (110, 150), 8) == 230


# -- what is fitted ----------------------------------------------------------------------------------------------------


def test_a_fit_never_sees_the_family_that_it_predicts() -> None:
    families = ["a", "b", "a", "c", "b"]
    seen = []

    def fit(rows: Any) -> Any:
        learned = {family for family, used in zip(families, rows, strict=True) if used}

        def predict(asked: Any) -> Any:
            seen.append((learned, {family for family, wanted in zip(families, asked, strict=True) if wanted}))
            return np.full(int(asked.sum()), float(len(seen)))

        return predict

    assert list(metrics.left_out(families, fit)) == [1.0, 2.0, 1.0, 3.0, 2.0]
    assert seen == [({"b", "c"}, {"a"}), ({"a", "c"}, {"b"}), ({"a", "b"}, {"c"})]


def test_one_family_alone_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="takes at least two"):
        metrics.linear_arm(([1.0, 1.0],), [1.0, 2.0], ["a", "a"])


def test_an_outlier_of_another_family_does_not_move_a_linear_fit() -> None:
    sizes = [float(size) for size in range(1, 21)]
    true = [100 + 2 * size for size in sizes]
    true[4] *= 5
    families = ["odd" if number % 2 else "even" for number in range(20)]
    predicted = metrics.linear_arm(([1.0] * 20, sizes), true, families)
    assert np.delete(predicted, 4) == pytest.approx(np.delete(100 + 2 * np.array(sizes), 4), rel=1e-3)


def test_a_base_is_taken_as_it_is_and_only_a_constant_fitted() -> None:
    base = [10.0, 20.0, 30.0, 40.0]
    true = [15.0, 25.0, 36.0, 46.0]
    predicted = metrics.linear_arm(([1.0] * 4,), true, ["a", "a", "b", "b"], base=base)
    assert list(predicted) == [16.0, 26.0, 35.0, 45.0]


def test_a_share_is_fitted_beside_a_constant_of_what_the_base_lacks() -> None:
    base, sizes = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [1.0, 5.0, 2.0, 4.0, 3.0, 6.0]
    true = [start + 7 + 3 * size for start, size in zip(base, sizes, strict=True)]
    predicted = metrics.linear_arm(([1.0] * 6, sizes), true, ["a", "a", "b", "b", "c", "c"], base=base)
    assert list(predicted) == pytest.approx(true)


def test_a_calibrated_margin_covers_what_it_should_on_families_it_has_not_seen() -> None:
    draw = np.random.default_rng(0)
    predicted = draw.uniform(1, 10, 4000)
    true = predicted * (1 + draw.normal(0, 0.1, 4000))
    families = [str(number % 10) for number in range(4000)]
    found = metrics.margin_coverage(predicted, true, families, coverage=0.9)
    assert found["measured_coverage"] == pytest.approx(0.9, abs=0.02)
    assert found["margin"] == pytest.approx(0.128, abs=0.01)  # 1.28 standard deviations


def test_a_margin_of_others_does_not_cover_a_family_that_is_unlike_them() -> None:
    predicted = np.full(40, 100.0)
    true = np.array([101.0] * 30 + [150.0] * 10)
    families = ["a"] * 15 + ["b"] * 15 + ["unlike"] * 10
    found = metrics.margin_coverage(predicted, true, families)
    assert found["lowest_family_coverage"] == 0.0
    assert found["measured_coverage"] == pytest.approx(0.75)


def test_margins_are_never_negative() -> None:
    assert metrics.calibrated_margin([10.0] * 30, [5.0] * 30) == 0.0


# -- the zoo -----------------------------------------------------------------------------------------------------------


def test_the_zoo_has_the_size_that_it_is_said_to_have() -> None:
    assert (len(FAMILIES), len(OPTIMIZERS), len(PRECISIONS)) == (12, 6, 3)
    assert all(family.num_samples % 4 == 0 for family in FAMILIES.values())


@pytest.mark.usefixtures("one_thread")
def test_what_is_measured_holds_weights_gradients_and_state() -> None:
    case = workload("unet", "adamw-fused", "float32", num_samples=1)
    weights = sum(parameter.nbytes for parameter in case.make_model().parameters())
    found = measured(case)
    assert found["first_bytes"] > 2 * weights
    assert found["steady_bytes"] >= 4 * weights


def _case(family: str, true: int, ours: int, tracker: int | None) -> dict[str, Any]:
    return {
        "family": family,
        "precision": "float32",
        "optimizer": "sgd-momentum",
        "measured": {"first_bytes": true - 1, "steady_bytes": true},
        "memwall": {"first_bytes": 1, "steady_bytes": ours, "seconds": 1.0},
        "arms_bytes": {"MemTracker": tracker},
        "no_answer": {} if tracker is not None else {"MemTracker": "no hooks"},
    }


def test_arms_are_compared_at_the_peak_of_both_steps_and_silence_is_counted() -> None:
    rows = [_case("a", 100, 99, 50), _case("b", 200, 200, 100)] * 10 + [_case("c", 100, 102, None)]
    found = truth_tables(rows)
    assert found["arms"]["memwall"]["num_rows"] == 21
    assert found["arms"]["memwall"]["worst"] == pytest.approx(0.02)
    assert found["worst"]["family"] == pytest.approx({"a": -0.01, "b": 0.0, "c": 0.02})
    assert found["arms"]["MemTracker"]["median"] == pytest.approx(0.5)
    assert (found["arms"]["MemTracker"]["num_rows"], found["arms"]["MemTracker"]["no_answer"]) == (20, 1)
    assert found["arms"]["MemTracker"]["reasons"] == ["no hooks"]


def test_shares_cover_what_they_shall_and_add_no_more_than_needed() -> None:
    """GIVEN rows that need a tenth of the one feature and three times the other, and one that nothing explains."""
    wide, narrow = np.array([100.0, 200.0, 400.0, 800.0] * 5), np.array([1.0, 40.0, 2.0, 7.0] * 5)
    base = wide.copy()
    true = base + 0.1 * wide + 3 * narrow
    first, second = metrics.covering_shares((wide, narrow), base, true, coverage=1.0)
    assert (first, second) == pytest.approx((0.1, 3.0))
    true[0] *= 100
    first, second = metrics.covering_shares((wide, narrow), base, true, coverage=0.95)
    assert (base + first * wide + second * narrow >= true - 1e-9).sum() == 19
    assert (first, second) == pytest.approx((0.1, 3.0))
    with pytest.raises(ValueError, match="cover 100% of the rows"):
        metrics.covering_shares((wide, np.zeros_like(wide)), base, true, coverage=1.0)


# -- measured runs of others -------------------------------------------------------------------------------------------


def _runs() -> tuple[list[Run], dict[str, dict[str, Any]]]:
    """Sixty runs that need a gigabyte and a tenth more than memwall says, with a published estimate that is far off."""
    runs, recorded = [], {}
    for number, batch in ((number, 8 << step) for number in range(20) for step in range(3)):
        reserved = 100 * (number + 1) * batch
        needs = 1024 + reserved + reserved // 10
        run = Run(f"m{number}", f"f{number % 5}", "cnn", batch, "3x8x8", MIB, 10.0 + number % 3, needs, "ok")
        runs.append(run)
        sizes = {
            "live_bytes": reserved * MIB,
            "reserved_bytes": reserved * MIB,
            "convolution_bytes": reserved * MIB // 4,
        }
        recorded[run.key] = {"key": run.key, **sizes}
    return runs, recorded


def test_measured_runs_are_judged_with_what_other_families_need_beside_the_allocator() -> None:
    runs, recorded = _runs()
    found = external_tables(runs, recorded)
    assert found["ok"]["memwall, affine"]["p95"] < 0.001
    assert found["ok"]["memwall, context fitted"]["median"] < found["ok"]["fake, three terms"]["median"]
    # What nothing but a share of the reserved bytes is missing of, a margin that learned it from others covers whole.
    runs_that_fit = [sum(run.measured_gpu_mib * MIB <= size * 10**9 for run in runs) for size in (8, 12, 16, 24, 40)]
    verdicts = found["margins"]["fitted_verdicts"].values()
    assert [verdict["not_said_fits"] for verdict in verdicts] == [0] * 5
    assert [verdict["fits_said_fits"] + verdict["fits_said_not"] for verdict in verdicts] == runs_that_fit
    # From batch 16 to 32 the largest model grows by 35,200 MiB; memwall says 32,000.
    probes = found["probes"]["8, 16"]
    assert probes["two probes, linear"]["worst"] == pytest.approx(0.0, abs=1e-9)
    assert probes["memwall after a step at 16"]["worst"] == pytest.approx(-3200 / (1024 + 70400))
    # From 8 to 32 it grows by 52,800 MiB; memwall says 48,000, and the published estimate, which is the same, nothing.
    one = found["one_probe"]["8"]
    assert one["memwall after a step at 8"]["worst"] == pytest.approx(-4800 / (1024 + 70400))
    assert one["one probe + difference of fake"]["worst"] == pytest.approx(-52800 / (1024 + 70400))
    assert one["memwall after a step at 8"]["num_rows"] == 40


def test_runs_that_could_not_be_recorded_are_named_and_left_out() -> None:
    runs, recorded = _runs()
    recorded["m0/8"] = {"key": "m0/8", "failure": "no fake version"}
    found = external_tables(runs, recorded)
    assert found["failures"] == {"m0/8": "no fake version"}
    assert (found["num_runs"], found["num_answered"], found["ok"]["fake, raw"]["num_rows"]) == (60, 59, 59)


def test_a_file_of_runs_that_is_none_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*runs\.csv"):
        read_runs(tmp_path / "runs.csv")
    (tmp_path / "runs.csv").write_text("model,family\nvgg16,vgg\n")
    with pytest.raises(UsageError, match=r"missing required field `kind`.*expected columns model, family"):
        read_runs(tmp_path / "runs.csv")


# -- targets -----------------------------------------------------------------------------------------------------------


def _result(median: float, p95: float, ours: float, theirs: float) -> dict[str, Any]:
    arms = {
        "memwall, context fitted": {"median": ours, "p90": ours},
        "fake, three terms": {"median": theirs, "p90": theirs},
    }
    return {
        "cpu": {"tables": {"arms": {"memwall": {"median": median, "p95": p95, "worst": p95}}}},
        "external": {
            "tables": {
                "ok": arms,
                "all": arms,
                "probes": {
                    "8, 16": {
                        "memwall after a step at 16": {"median": ours, "p90": ours},
                        "two probes, linear": {"median": theirs, "p90": 1.0},
                    }
                },
            }
        },
    }


def test_a_missed_target_is_a_line_and_a_status() -> None:
    assert prediction.failures(_result(0.01, 0.05, 0.02, 0.03)) == []
    assert prediction.failures(_result(0.011, 0.05, 0.02, 0.03)) == ["zoo: median error 1.10%; the target is 1%"]
    assert prediction.failures(_result(0.01, 0.06, 0.03, 0.03)) == [
        "zoo: p95 error 6.00%; the target is 5%",
        "measured runs: median error 3.00%; the three-term fit has 3.00%",
        "measured runs: p90 error 3.00%; the three-term fit has 3.00%",
        "measured runs with spikes: median error 3.00%; the three-term fit has 3.00%",
        "measured runs with spikes: p90 error 3.00%; the three-term fit has 3.00%",
        "larger batches, 8, 16 known: median error 3.00%; the line through them 3.00%",
    ]


def test_new_tables_need_rows_of_the_same_runs(tmp_path: Path) -> None:
    runs, recorded = _runs()
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, Run.__struct_fields__)
        writer.writeheader()
        writer.writerows(msgspec.to_builtins(run) for run in runs)
    before = {"runs_sha256": file_sha256(path), "commit": "abc", "rows": list(recorded.values()), "tables": {}}
    found = prediction.external_part_again(path, before)
    assert found["commit"] == "abc"
    assert found["tables"]["ok"]["memwall, affine"]["p95"] < 0.001
    with pytest.raises(UsageError, match="no external part was published yet"):
        prediction.external_part_again(path, {})
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UsageError, match=r"not of .*runs\.csv, whose hash differs"):
        prediction.external_part_again(path, before)


def test_the_allocator_that_measured_runs_are_asked_of_is_one_that_memwall_knows() -> None:
    assert profile_for(ALLOCATOR)[1] == ""
