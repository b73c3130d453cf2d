"""What every number that is printed or stored has to carry: a unit in its name, and how its record was obtained."""

import re
from collections.abc import Iterator
from typing import Any

from memwall.units import format_bytes

__all__ = ["figures_of", "sizes_not_in", "untagged", "without_unit"]

# What was asked for or chosen: no figure that was found.
_SETTINGS = {"budget_bytes", "micro_batch", "num_micro_batches"}
TAGS = {"simulated", "cpu-measured", "gpu-measured", "external"}
# Parts of a name that say what is counted; a number without one takes it from the record around it.
_UNITS = re.compile(
    r"(^|_)(bytes|seconds|per_second|per_step|percent|shares?|ratios?|coverage|error|errors|number|slack)($|_)"
)
_COUNTS = re.compile(
    r"(^|_)(num|count|counts|steps?|batch|samples?|tokens|length|layers|width|rows|parameters|calls|recoveries|cores"
    r"|threads|events|loss|losses|exits?|status|times|load|address|index|kernels|faults|hits|kills|ops|goal|line|version"
    r"|position|numbers|op)($|_)"
)
# Statistics of errors, which are ratios: (predicted - true) / true.
_STATISTICS = {
    "worst",
    "median",
    "mean",
    "p90",
    "p95",
    "bias",
    "margin",
    "gap_of_step",
    "tolerance_of_step",
    "slowdown",
}
# A stage of ZeRO, layers that a trial had, sizes of a tensor, pixels of a square image, a share, and which device of a
# machine it is.
_NAMED = {"stage", "trials", "input_shape", "shape", "size", "shipped_median_waste", "device", "recorded_device"}
# Records whose keys are what was counted, or where bytes lie.
_MAPS = {"attention_kernels", "by_category", "false_fits", "load_average", "worst"}
_VERDICTS = re.compile(r"^(fits|not)_said_(fits|not)$|^no_answer$")


def figures_of(record: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number, with the names that lead to it."""
    if isinstance(record, dict):
        for name, value in record.items():
            yield from figures_of(value, (*path, str(name)))
    elif isinstance(record, list):
        for value in record:
            yield from figures_of(value, path)
    elif isinstance(record, (int, float)) and not isinstance(record, bool):
        yield path, record


def without_unit(record: Any) -> list[str]:
    """Numbers whose names do not say what they count."""
    found = {path for path, _ in figures_of(record) if not (_counts(path[-1]) or any(map(_measures, path)))}
    return sorted(".".join(path) for path in found)


def untagged(record: Any, *, is_tagged: bool = False, path: str = "") -> list[str]:
    """Records of figures that nothing around them gives a tag; and tags that are none of the four."""
    found: list[str] = []
    if isinstance(record, dict):
        own = record.get("tag", record.get("before_tag", record.get("kind")))
        if isinstance(own, str) and set(own.split(" against ")) <= TAGS:
            is_tagged = True
        elif "tag" in record:
            found.append(f"{path}: tag {own!r}")
        for name, value in record.items():
            found += untagged(None if name in _SETTINGS else value, is_tagged=is_tagged, path=f"{path}.{name}")
    elif isinstance(record, list):
        for value in record:
            found += untagged(value, is_tagged=is_tagged, path=path)
    elif isinstance(record, (int, float)) and not isinstance(record, bool) and not is_tagged:
        found.append(path)
    return sorted(set(found))


def sizes_not_in(record: Any, text: str) -> list[str]:
    """Sizes of a table, as `1.50 GiB`, that are no number of the object printed with it, and in none of its texts."""
    known = {format_bytes(value) for _, value in figures_of(record)} | set(_sizes(" ".join(_texts_of(record))))
    return sorted(set(_sizes(text)) - known)


def _sizes(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d[\d.]* [KMGT]?i?B\b", " ".join(text.split()))


def _texts_of(record: Any) -> Iterator[str]:
    if isinstance(record, str):
        yield record
    elif isinstance(record, (dict, list)):
        for value in record.values() if isinstance(record, dict) else record:
            yield from _texts_of(value)


def _counts(name: str) -> bool:
    return bool(_COUNTS.search(name) or name in _STATISTICS | _NAMED or _VERDICTS.search(name))


def _measures(name: str) -> bool:
    """Whether everything in a record of this name is in the unit that it says."""
    return bool(_UNITS.search(name) or name in _MAPS)
