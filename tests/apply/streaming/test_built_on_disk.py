"""Models larger than memory: built with a window of parameters in memory, to the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from streamed_models import GPT, KIB, everything, loss_of
from torch import nn

from memwall.apply.streaming.building import Building
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import DiskPlace
from memwall.errors import StoreError
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

pytestmark = [pytest.mark.leaves_changed, pytest.mark.timeout(60)]
WINDOW_BYTES = 64 * KIB


@pytest.fixture
def tier(state_pool: TransferPool) -> ParameterTier:
    return ParameterTier(DiskPlace(state_pool), window_bytes=WINDOW_BYTES, min_bytes=4 * KIB)


def built(make: Callable[[], nn.Module] = GPT) -> nn.Module:
    torch.manual_seed(0)
    return make()


def built_onto(tier: ParameterTier) -> Building:
    return Building(lambda _: True, lambda: tier)


class Initialised(GPT):
    """Draws all its weights again once it is whole, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__(num_layers=8)
        self.apply(self.draw)
        self.head.weight = self.tokens.weight

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.uniform_(module.bias)
        if isinstance(module, nn.Embedding):
            with torch.no_grad():
                module.weight[0].zero_()


@pytest.mark.parametrize("make", [GPT, Initialised])
def test_a_model_is_built_to_the_same_bits(make: Callable[[], nn.Module], tier: ParameterTier) -> None:
    plain = built(make)
    register = nn.Module.register_parameter
    with built_onto(tier):
        model = built(make)
    assert nn.Module.register_parameter is register
    assert everything(model).keys() == everything(plain).keys()
    assert [n for n, p in plain.named_parameters() if not torch.equal(p, dict(model.named_parameters())[n])] == []
    assert model.get_submodule("head").weight is model.get_submodule("tokens").weight


def test_a_window_is_in_memory_while_it_is_built(tier: ParameterTier, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: dict[int, int] = {}
    most = 0
    original = nn.Module.__setattr__

    def counting(module: nn.Module, name: str, value: object) -> None:
        nonlocal most
        original(module, name, value)
        if isinstance(value, nn.Parameter):
            alive[id(value)] = value.nbytes
            waiting = sum(n for key, n in alive.items() if key not in {id(member.parameter) for member in tier})
            most = max(most, waiting + tier.resident_bytes)

    monkeypatch.setattr(nn.Module, "__setattr__", counting)
    with built_onto(tier):
        model = built(lambda: GPT(num_layers=12))
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert most < 4 * WINDOW_BYTES < total / 4
    assert tier.num_bytes > 0.9 * total


@pytest.mark.slow
def test_what_was_built_on_disk_trains_like_a_plain_model(tier: ParameterTier) -> None:
    found = []
    for is_streamed in (False, True):
        if is_streamed:
            with built_onto(tier):
                model = built()
            streaming = ParameterStreaming(model, tier)
        else:
            model = built()
        for seed in range(2):
            loss_of(model, seed).backward()
        if is_streamed:
            streaming.undo()
        found.append(everything(model))
    assert [name for name, value in found[0].items() if not torch.equal(found[1][name], value)] == []


def test_a_full_disk_while_building_is_an_error_and_modules_are_as_before(tmp_path: Path) -> None:
    register = nn.Module.register_parameter
    with TransferPool(ScratchFile(tmp_path, capacity_bytes=100 * KIB)) as pool:
        tier = ParameterTier(DiskPlace(pool), window_bytes=WINDOW_BYTES, min_bytes=4 * KIB)
        with pytest.raises(StoreError, match="more of disk are needed"), built_onto(tier):
            built()
    assert nn.Module.register_parameter is register
