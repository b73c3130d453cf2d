"""The published tables of predictions follow from their rows, and pages show the figures that the file has."""

import json
import math
from pathlib import Path
from typing import Any

import prediction
import prediction_report as report
import prediction_zoo
import pytest
from prediction_claims import CLAIMS
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, zoo_sha256

from memwall.errors import UsageError
from memwall.predict.device import CONVOLUTION_SHARE, MARGIN_BASIS, MARGIN_SHARE


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two results differ, numbers by more than other processors' order of adding makes them."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [line for key in expected for line in differences(found[key], expected[key], f"{path}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{path}/{number}")]
    is_number = isinstance(expected, float) and isinstance(found, (int, float))
    is_same = math.isclose(found, expected, rel_tol=1e-9) if is_number else found == expected
    return [] if is_same else [f"{path}: {found!r}, not {expected!r}"]


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.RESULT.read_text())
    return found


def test_the_published_result_is_of_this_zoo_and_its_figures_follow_from_its_rows(published: dict[str, Any]) -> None:
    part = published["cpu"]
    assert part["zoo_sha256"] == zoo_sha256()
    assert len(part["rows"]) == len(FAMILIES) * len(OPTIMIZERS) * len(PRECISIONS)
    assert differences(report.rounded(prediction.cpu_part_again(part)), part) == []
    assert prediction.failures(published) == []


def test_every_published_table_has_the_three_figures_that_the_literature_compares(published: dict[str, Any]) -> None:
    cpu, external = published["cpu"]["tables"], published["external"]["tables"]
    tables = [
        cpu["arms"],
        cpu["phases"],
        external["ok"],
        external["all"],
        *external["probes"].values(),
        *external["one_probe"].values(),
    ]
    for arms in tables:
        for name, arm in arms.items():
            if arm["num_rows"] == 0:
                continue
            assert arm["median"] >= 0, name
            assert 0 <= arm["false_fits"]["0"] <= 1, name
            assert 0 <= arm["memory_saved_share"] <= 1, name
            assert arm["margin"]["measured_coverage"] > 0.5, name


def test_a_list_of_cases_that_was_edited_makes_the_result_void(published: dict[str, Any]) -> None:
    edited = {**published, "cpu": published["cpu"] | {"zoo_sha256": "of another list"}}
    assert prediction.failures(edited) == ["zoo: the list of cases has changed since; run again"]
    with pytest.raises(UsageError, match="the zoo has changed since the published rows were measured"):
        prediction.cpu_part_again(edited["cpu"])
    fewer = {**published, "external": published["external"] | {"known_runs": published["external"]["known_runs"][1:]}}
    assert prediction.failures(fewer) == []  # each T4 row is there twice, for both types of half precision
    fewer["external"]["known_runs"] = published["external"]["known_runs"][2:]
    assert prediction.failures(fewer) == ["runs with known settings: the list has changed since; run again"]


def test_the_hash_of_the_zoo_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "prediction_zoo.py"
    copy.write_bytes(Path(prediction_zoo.__file__).read_bytes())
    before = zoo_sha256()
    monkeypatch.setattr(prediction_zoo, "__file__", str(copy))
    assert zoo_sha256() == before
    copy.write_text(copy.read_text().replace('"n_layer": 4', '"n_layer": 5').replace("n_layer=4", "n_layer=5"))
    assert zoo_sha256() != before


def test_what_others_claim_stands_apart_and_has_its_tag(published: dict[str, Any]) -> None:
    page = report.section(published)
    claims = [line for line in page.splitlines() if line.endswith(("[claimed] |", "[source] |"))]
    assert len(claims) == len(CLAIMS) + 1  # the heading of the runs with known settings, whose last column is claimed
    assert (
        "measured GiB [external] | memwall GiB [simulated] | error | error of the published estimate [claimed] |"
        in page
    )
    for line in page.splitlines():
        if line.startswith("| memwall"):
            assert "claimed" not in line


def test_the_readme_shows_the_published_figures(published: dict[str, Any]) -> None:
    page = report.README.read_text()
    assert report.with_section(page, report.section(published)) == page


def test_the_default_margin_is_the_fitted_one_and_names_its_coverage_of_families_left_out(
    published: dict[str, Any],
) -> None:
    margins = published["external"]["tables"]["margins"]
    fitted = [math.ceil(100 * share - 1e-6) / 100 for share in margins["fitted_shares"]]
    assert fitted == [MARGIN_SHARE, CONVOLUTION_SHARE]
    assert margins["shipped_coverage"] >= margins["wanted_coverage"]
    assert f"covers {100 * margins['fitted_coverage']:.0f} % of others' published runs" in MARGIN_BASIS
    for text in (f"{100 * MARGIN_SHARE:.0f} % of reserved", f"{CONVOLUTION_SHARE} times the tensors"):
        assert text in MARGIN_BASIS


def test_the_page_of_measurements_shows_the_published_figures(published: dict[str, Any]) -> None:
    page = " ".join((report.README.parents[1] / "docs" / "measured.md").read_text().split())
    zoo, runs = published["cpu"]["tables"]["arms"]["memwall"], published["external"]["tables"]
    ours, theirs = runs["ok"]["memwall, context fitted"], runs["ok"]["fake, three terms"]
    covered = runs["margins"]["fitted_coverage_by_kind"]
    verdicts = runs["margins"]["fitted_verdicts"].values()
    false = sum(verdict["not_said_fits"] for verdict in verdicts)
    said = false + sum(verdict["fits_said_fits"] for verdict in verdicts)
    for figure in (
        f"{zoo['num_rows']} cases",
        f"never more than {100 * abs(zoo['worst']):.2f} % off",
        f"Against {ours['num_rows']:,} runs",
        f"median error {100 * ours['median']:.1f} %, p90 {100 * ours['p90']:.1f} %",
        f"has {100 * theirs['median']:.1f} and {100 * theirs['p90']:.1f} %",
        f"covers {100 * runs['margins']['fitted_coverage']:.0f} % of the runs of families that it was not fitted on",
        f"all transformers, {100 * covered['mlp']:.0f} % of MLPs",
        f"{100 * covered['cnn']:.0f} % of convolutional networks",
        f'of its verdicts "fits" on devices of 8 to 40 GB, {100 * false / said:.1f} % are false',
    ):
        assert figure in page
    assert covered["transformer"] == 1.0
