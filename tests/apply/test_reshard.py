"""Units of FSDP2 free what they gathered after forward under a plan, are seen to, and keep it again afterwards."""

import pytest
import torch
from block_models import WIDTH, Model
from plans import plan_of
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import memwall
from memwall.apply.resharding import with_resharding
from memwall.errors import ApplyError, NoEffectError
from memwall.planning.techniques.reshard import Reshard
from memwall.torch_internals.sharding import is_sharded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo"),
]


def divided() -> nn.Module:
    model = Model()
    for unit in (*model.blocks, model):
        fully_shard(unit, reshard_after_forward=False)
    return model


def freed_by(model: nn.Module) -> list[bool]:
    """Returns for each block whether it is a part again after forward, in one step."""
    loss = model(torch.ones(4, WIDTH)).square().mean()
    found = [all(map(is_sharded, block.parameters())) for block in model.blocks]
    loss.backward()
    return found


def planned(model: nn.Module) -> tuple[memwall.Session, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memwall.fit(model, optimizer, plan=plan_of(model, Reshard(units=("blocks.0",)))), optimizer


def test_units_are_freed_while_the_plan_stands() -> None:
    model = divided()
    session, optimizer = planned(model)
    with session:
        for _ in range(3):
            assert freed_by(model) == [True, False]
            optimizer.step()
    assert freed_by(model) == [False, False]


def test_units_that_stay_whole_all_the_same_are_told() -> None:
    model = divided()
    model.blocks[0].register_forward_pre_hook(lambda block, _: block.set_reshard_after_forward(False))
    session, optimizer = planned(model)
    with session:
        freed_by(model)
        with pytest.raises(NoEffectError, match=r"blocks\.0 freed after forward.*they stay whole"):
            optimizer.step()


def test_a_model_that_is_divided_otherwise_is_refused() -> None:
    model = Model()
    session, _ = planned(model)
    with session, pytest.raises(ApplyError, match=r"1 of them are no units here, 'blocks\.0' first; make a plan"):
        freed_by(model)


def test_units_are_freed_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a unit that cannot be set WHEN a plan frees it after another one THEN that one is as the script has it."""
    model = divided()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("it cannot be set")

    monkeypatch.setattr(model.blocks[1], "set_reshard_after_forward", fails)
    with pytest.raises(RuntimeError, match="cannot be set"):
        with_resharding(model, {"blocks.0": True, "blocks.1": True})
    assert freed_by(model) == [False, False]
