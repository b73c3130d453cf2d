"""A step that another version of memwall committed is refused with who can read it."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from memwall.checkpoint.committed import Committed, Content
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.training_state import encode_objects
from memwall.errors import StoreError


def restoration(content: bytes) -> Restoration:
    """GIVEN a journal in DIR whose fourth step has this content."""
    journal, found = SimpleNamespace(directory="DIR"), SimpleNamespace(step=4, content=content, buckets=())
    return Restoration([Committed(cast(Any, journal), cast(Any, found))])


def test_a_plan_of_another_version() -> None:
    content = Content(tensors=(), objects=encode_objects({"helpers": []}), plan=b'{"schema": "memwall.plan/1"}')
    with pytest.raises(StoreError) as error:
        _ = restoration(msgspec.msgpack.encode(content)).plan
    assert str(error.value).startswith("step 4 in DIR was committed by another version of memwall (")
    assert str(error.value).endswith("); resume with the one that wrote it")


def test_content_of_another_version() -> None:
    with pytest.raises(StoreError, match="step 4 in DIR was committed by another version of memwall"):
        restoration(msgspec.msgpack.encode({"tensors": 1}))
