"""Another number of ranks is given what of a step is no tensor where that is sure, and is refused elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest

from memwall.checkpoint.redivision import _objects
from memwall.checkpoint.training_state import decode_objects, encode_objects
from memwall.errors import UsageError


def source(
    *,
    loop: dict[str, Any] | None = None,
    stateful: dict[str, Any] | None = None,
    generators: dict[str, Any] | None = None,
) -> Any:
    """Returns what stands for a rank's committed step."""
    beside = encode_objects({"generators": generators or {}, "stateful": stateful or {}, "uncommitted": []})
    of_loop = None if loop is None else {"stateful": loop, "random": {}, "position": 2}
    return SimpleNamespace(objects={"random": {}, "loop": of_loop, "beside": beside})


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("others", [{"sampler": {"position": 9}}, {}], ids=["another", "none"])
def test_positions_that_differ_are_refused_by_fewer_ranks_too(place: int, others: dict[str, Any]) -> None:
    """GIVEN samplers found by their variable, each at a position of its own THEN no rank drops those of others."""
    sources = [source(stateful={"sampler": {"position": 1}}), source(stateful=others)]
    with pytest.raises(UsageError, match="'sampler' has another state on each of the 2 ranks that committed this step"):
        _objects(sources, place, is_new=False)


@pytest.mark.parametrize("is_new", [False, True])
def test_state_that_is_equal_goes_to_all(is_new: bool) -> None:
    sources = [source(stateful={"sampler": {"position": 1}}, loop={"loader": {"at": 3}}) for _ in range(2)]
    objects, fresh = _objects(sources, 1, is_new=is_new)
    assert decode_objects(objects["beside"])["stateful"] == {"sampler": {"position": 1}}
    assert objects["loop"]["stateful"] == {"loader": {"at": 3}}
    assert fresh == []


def test_a_new_rank_has_no_generator_of_another_one() -> None:
    sources = [source(generators={"noise": (rank,)}) for rank in range(2)]
    objects, fresh = _objects(sources, 0, is_new=True)
    assert decode_objects(objects["beside"])["fresh"] == ["noise"]
    assert fresh == ["'noise'"]
    assert _objects(sources, 1, is_new=False)[1] == []


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (None, "rank 1 of 2 committed this step in a loop of another form, and rank 0 in a loop over .* with loader"),
        ({"sampler": 1}, "rank 1 of 2 committed this step in a loop over memwall.steps with sampler, and rank 0 in"),
    ],
)
def test_loops_that_are_not_the_same_are_refused(place: int, other: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _objects([source(loop={"loader": 1}), source(loop=other)], place, is_new=False)
