"""The table of forecasts against the phantom device's allocator: what it says of failures, and where it is shown."""

import json

import phantom_truth
import pytest
from phantom_forecast import PHASES

PAGE = phantom_truth.OUTPUT.parents[3] / "docs" / "measured.md"
STARTS = {"allocated_bytes": "Of allocated bytes (", "reserved_bytes": "Of reserved bytes it is"}
"""Begin the sentences in which the page says what deviates by more than 0.1 %."""
NAMES = {
    "resnet": "ResNet",
    "mobilenet": "MobileNet",
    "convnext": "ConvNeXt",
    "vit": "ViT",
    "bert": "BERT",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "mixtral": "Mixtral",
    "t5": "T5",
    "whisper": "whisper",
    "unet": "U-Net",
    "recurrent": "recurrent model",
}
"""Holds what the page calls each family of the zoo."""


def test_a_card_on_which_every_case_fails_has_a_table_that_says_so() -> None:
    found = phantom_truth.table([{"device": "l4", "case": "gpt2/float32/sgd", "failure": "RuntimeError: no"}])
    assert found["missed"] == ["every case failed"]
    assert found["failed"] == {"gpt2/float32/sgd": "RuntimeError: no"}


def test_a_row_beyond_its_goal_is_missed_and_explained() -> None:
    counted = {"allocated_bytes": 100, "reserved_bytes": 200, "requested_bytes": 90, "small_reserved_bytes": 0}
    counted = {name: size << 20 for name, size in counted.items()}
    row = {"device": "l4", "case": "one", "counted": dict.fromkeys(PHASES, counted)}
    more = {"allocated_bytes": 102 << 20, "requested_bytes": 92 << 20}
    row["foreseen"] = dict.fromkeys(PHASES, counted) | {"steady": counted | more}
    found = phantom_truth.table([row])
    assert found["missed"] == ["steady allocated_bytes median", "steady allocated_bytes worst"]
    assert found["deviating"] == {"one": {"steady allocated_bytes": [pytest.approx(0.02), "+2.00 MiB of tensors"]}}


def test_the_published_table_is_the_result_file() -> None:
    tables = json.loads(phantom_truth.OUTPUT.read_text())["tables"]
    for device, figures in tables.items():
        for quantity in phantom_truth.GOALS:
            assert phantom_truth.line(device, figures, quantity) in PAGE.read_text()


def test_every_case_meets_every_goal_as_the_page_says() -> None:
    """GIVEN the published rows THEN there is one of each case, and none misses a goal in any phase."""
    found = json.loads(phantom_truth.OUTPUT.read_text())
    assert {device: (figures["missed"], figures["failed"]) for device, figures in found["tables"].items()} == {
        card: ([], {}) for card in phantom_truth.CARDS
    }
    assert len({(row["device"], row["case"]) for row in found["rows"]}) == found["num_cases"]
    assert f"All {found['num_cases']} cases meet them in every phase" in PAGE.read_text().replace("\n", " ")


def test_every_deviation_says_what_it_is_made_of() -> None:
    tables = json.loads(phantom_truth.OUTPUT.read_text())["tables"]
    causes = [cause for t in tables.values() for e in t["deviating"].values() for _, cause in e.values()]
    assert causes
    assert "" not in causes


@pytest.mark.parametrize("quantity", phantom_truth.GOALS)
def test_the_page_names_each_family_that_deviates_notably(quantity: str) -> None:
    tables = json.loads(phantom_truth.OUTPUT.read_text())["tables"]
    families = {
        case.partition("/")[0]
        for figures in tables.values()
        for case, errors in figures["deviating"].items()
        if any(name.endswith(quantity) for name in errors)
    }
    page = PAGE.read_text().replace("\n", " ")
    num_cases = sum(len(figures["deviating"]) for figures in tables.values())
    assert f"In {num_cases} cases something deviates" in page
    sentences = page.split(". ")
    (sentence,) = (each for each in sentences if each.startswith(STARTS[quantity]))
    assert {family for family, name in NAMES.items() if name in sentence} == families
