"""Models larger than memory: built, loaded and saved with a window of parameters in memory, to the same bits."""

import copy
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from streamed_models import GPT, KIB, everything, loss_of
from torch import Tensor, nn

from memwall.apply.streaming.model import load_safetensors, save_safetensors, streamed_init
from memwall.apply.streaming.parameters import ParameterStreaming
from memwall.apply.streaming.tier import ParameterTier
from memwall.errors import ApplyError, StoreError
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

pytestmark = [pytest.mark.leaves_changed, pytest.mark.timeout(60)]
WINDOW_BYTES = 64 * KIB


@pytest.fixture
def tier(state_pool: TransferPool) -> ParameterTier:
    return ParameterTier(state_pool, window_bytes=WINDOW_BYTES, min_bytes=4 * KIB)


def built(make: Callable[[], nn.Module] = GPT) -> nn.Module:
    torch.manual_seed(0)
    return make()


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


# Building.


@pytest.mark.parametrize("make", [GPT, Initialised])
def test_a_model_is_built_to_the_same_bits(make: Callable[[], nn.Module], tier: ParameterTier) -> None:
    plain = built(make)
    register = nn.Module.register_parameter
    with streamed_init(tier):
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
    with streamed_init(tier):
        model = built(lambda: GPT(num_layers=12))
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert most < 4 * WINDOW_BYTES < total / 4
    assert tier.num_bytes > 0.9 * total


def test_what_was_built_on_disk_trains_like_a_plain_model(tier: ParameterTier) -> None:
    found = []
    for is_streamed in (False, True):
        if is_streamed:
            with streamed_init(tier):
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
        tier = ParameterTier(pool, window_bytes=WINDOW_BYTES, min_bytes=4 * KIB)
        with pytest.raises(StoreError, match="more of disk are needed"), streamed_init(tier):
            built()
    assert nn.Module.register_parameter is register


# Saving and loading.


def test_what_is_saved_is_what_safetensors_would_save(tier: ParameterTier, tmp_path: Path) -> None:
    plain = built()
    plain.register_buffer("scale", torch.arange(3, dtype=torch.bfloat16))
    plain.register_buffer("empty", torch.zeros(0, dtype=torch.int64))
    model = copy.deepcopy(plain)
    streaming = ParameterStreaming(model, tier)
    save_safetensors(model, tmp_path / "streamed.safetensors", tier)
    assert tier.resident_bytes == 0
    streaming.undo()
    save_model(plain, str(tmp_path / "plain.safetensors"))
    one, other = load_file(tmp_path / "streamed.safetensors"), load_file(tmp_path / "plain.safetensors")
    tied = {"head.weight", "tokens.weight"}
    assert one.keys() - tied == other.keys() - tied
    assert len(one.keys() & tied) == 1
    assert all(torch.equal(one[name], other[name]) for name in one.keys() - tied)
    fresh = GPT()
    fresh.register_buffer("scale", torch.zeros(3, dtype=torch.bfloat16))
    fresh.register_buffer("empty", torch.zeros(0, dtype=torch.int64))
    load_model(fresh, tmp_path / "streamed.safetensors")
    assert [n for n, t in plain.state_dict().items() if not torch.equal(fresh.state_dict()[n], t)] == []
    assert {path.name for path in tmp_path.iterdir()} == {"streamed.safetensors", "plain.safetensors"}


def test_matrices_that_lie_transposed_are_saved_as_they_read(tier: ParameterTier, tmp_path: Path) -> None:
    model = nn.Linear(64, 48)
    model.weight = nn.Parameter(torch.randn(64, 48).t())
    expected = model.weight.detach().clone()
    ParameterStreaming(model, tier)
    save_safetensors(model, tmp_path / "file", tier)
    assert torch.equal(load_file(tmp_path / "file")["weight"], expected)


@pytest.mark.parametrize("kind", ["in memory", "on disk", "on the meta device"])
def test_a_file_is_loaded_into_any_model(kind: str, tier: ParameterTier, tmp_path: Path) -> None:
    plain = built()
    save_model(plain, str(tmp_path / "file"))
    if kind == "on the meta device":
        with torch.device("meta"):
            model: nn.Module = GPT()
        model.head.weight = model.tokens.weight  # type: ignore[union-attr, assignment]
    elif kind == "on disk":
        with streamed_init(tier):
            model = GPT()
    else:
        model = GPT()
    before = list(model.parameters())
    load_safetensors(model, tmp_path / "file", tier)
    assert tier.resident_bytes <= 2 * WINDOW_BYTES
    assert (tier.num_bytes > 0) == (kind != "in memory")
    assert model.get_submodule("head").weight is model.get_submodule("tokens").weight
    if kind != "on the meta device":
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    found = dict(model.named_parameters())
    assert [name for name, p in plain.named_parameters() if not torch.equal(found[name], p)] == []


def test_a_file_of_another_model_is_refused(tier: ParameterTier, tmp_path: Path) -> None:
    save_model(GPT(num_layers=5), str(tmp_path / "deeper"))
    with pytest.raises(ApplyError, match=r"deeper does not belong to this model: the model has no 'layers\.4\."):
        load_safetensors(GPT(), tmp_path / "deeper", tier)
    save_model(GPT(num_layers=3), str(tmp_path / "flatter"))
    with pytest.raises(ApplyError, match=r"the file has no 'layers\.3\..* \(8 such names in all\)"):
        load_safetensors(GPT(), tmp_path / "flatter", tier)
    save_model(nn.Linear(3, 5), str(tmp_path / "wider"))
    with pytest.raises(ApplyError, match=r"'(weight|bias)' has the shape \[5(, 3)?\], but the model's is \[4(, 3)?\]"):
        load_safetensors(nn.Linear(3, 4), tmp_path / "wider", tier)


def test_what_a_file_cannot_give_must_not_stay_on_the_meta_device(tier: ParameterTier, tmp_path: Path) -> None:
    class Rotating(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("angles", torch.arange(3.0), persistent=False)

    save_model(Rotating(), str(tmp_path / "file"))
    with torch.device("meta"):
        model = Rotating()
    with pytest.raises(ApplyError, match=r"'angles' is not in the file .* build the model under streamed_init"):
        load_safetensors(model, tmp_path / "file", tier)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tier: ParameterTier, tmp_path: Path) -> None:
    model = built()
    save_safetensors(model, tmp_path / "file", tier)
    before = (tmp_path / "file").read_bytes()
    assert struct.unpack("<Q", before[:8])[0] % 8 == 0
    model.register_parameter("odd", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    with pytest.raises(ApplyError, match=r"'odd' has the type torch\.complex64, which safetensors files cannot hold"):
        save_safetensors(model, tmp_path / "file", tier)
    assert (tmp_path / "file").read_bytes() == before
    assert isinstance(model.odd, Tensor)
