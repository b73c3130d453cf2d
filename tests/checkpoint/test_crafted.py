"""A step whose digests are right and whose contents are not, as a stranger's may be, is refused in one clear error."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from memwall.checkpoint.committed import Committed, Content
from memwall.checkpoint.training_state import TensorRecord, check_records, encode_objects
from memwall.errors import StoreError
from memwall.session.next_budget import read_next_budget

OPTIMIZER: dict[str, Any] = {"class": "AdamW", "groups": [], "state": {}, "low_bit": {}}
WHOLE: dict[str, Any] = {"optimizer": OPTIMIZER, "helpers": [], "random": {}, "loop": None, "state_dict": {}}


def committed(objects: dict[str, Any]) -> Committed:
    return committed_as(encode_objects(objects))


def committed_as(objects: bytes) -> Committed:
    content = msgspec.msgpack.encode(Content(tensors=(), objects=objects, plan=None))
    found = SimpleNamespace(step=4, content=content, buckets=())
    return Committed(cast(Any, SimpleNamespace(directory="DIR")), cast(Any, found))


def test_a_step_without_tensors_is_read() -> None:
    assert committed(WHOLE).optimizers == [OPTIMIZER]


@pytest.mark.parametrize(
    "changed",
    [
        {"state_dict": {"weight": "parameter/weight"}},
        {"state_dict": ["weight"]},
        {"optimizer": 3},
        {"optimizer": {**OPTIMIZER, "groups": [{"options": {}}]}},
        {"optimizer": {"groups": [], "state": {}}},
        {"helpers": [1]},
        {"further_optimizers": [None]},
    ],
)
def test_one_whose_parts_are_something_else_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="step 4 in DIR was committed by another version of memwall"):
        committed(WHOLE | changed)


@pytest.mark.parametrize("objects", [3, "objects", [WHOLE]])
def test_one_whose_objects_are_none_is_refused(objects: Any) -> None:
    written = io.BytesIO()
    torch.save(objects, written)
    with pytest.raises(StoreError, match=r"by another version of memwall \(its objects are \w+, not dict\)"):
        committed_as(written.getvalue())


@pytest.mark.parametrize("stride", [(0, 1), (1, 1), (6, 2)])
def test_a_tensor_whose_elements_do_not_lie_side_by_side_is_refused(stride: tuple[int, int]) -> None:
    """GIVEN strides that no commit writes THEN they are refused before anything is copied over itself."""
    place: dict[str, Any] = {"is_on_host": True, "bucket": 0, "offset": 0}
    whole = TensorRecord(name="parameter/weight", dtype="float32", shape=(2, 3), stride=(1, 2), **place)
    check_records([whole], [1024])
    with pytest.raises(ValueError, match=r"'parameter/weight' has elements that overlap or lie apart, by strides"):
        check_records([msgspec.structs.replace(whole, stride=stride)], [1024])


@pytest.mark.parametrize("content", [b"\xff", b'{"budget_bytes": "1"}', b"[" * 100_000, b""])
def test_a_budget_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "out-of-memory.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"out-of-memory\.json cannot be read"):
        read_next_budget(tmp_path, 100)
