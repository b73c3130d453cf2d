"""What stands on torch's insides, where they are missing: a figure that is not available is said to be so."""

import pytest
import torch
from torch import nn

from memwall.apply.techniques import autocast
from memwall.planning.techniques.autocast import Autocast
from memwall.trace import workspaces


def test_workspaces_count_nothing_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workspaces, "has_allocation_events", False)
    found = workspaces.Workspaces()
    tensor = torch.ones(64, 64)
    with found.measuring(torch.ops.aten.mm.default, [tensor, tensor], (tensor, tensor), {}) as measured:
        torch.empty(1 << 16)
    assert measured.beyond(0) == ()
    assert caplog.messages[0].startswith(
        f"what operators allocate for themselves is not available with torch {torch.__version__}, and counts as 0 bytes"
    )


def test_autocast_is_not_judged_where_nodes_tell_no_dtype(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autocast, "has_input_dtypes", False)
    model = nn.Linear(2, 2)
    effect = autocast.AutocastEffect(Autocast(dtype="bfloat16"), model)
    model(torch.ones(1, 2))
    assert (effect.is_seen(), effect.contrary()) == (True, "")
    assert caplog.messages == [
        f"autocast to bfloat16: whether it has an effect cannot be seen with torch {torch.__version__}"
    ]
    effect.close()
