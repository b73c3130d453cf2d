"""Models that a script builds under a budget which has no room for them: on disk as they are made, to the same bits."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from streamed_models import GPT, KIB, everything, large, on_disk
from torch import nn

from memwall.apply.streaming import building as parameter_building
from memwall.apply.streaming.building import Building, leaves_no_room
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import DiskPlace
from memwall.store.transfer import TransferPool

pytestmark = [pytest.mark.leaves_changed, pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]
WINDOW_BYTES, LARGEST_BYTES = 32 * KIB, 48 * KIB


@pytest.fixture
def tier(state_pool: TransferPool) -> ParameterTier:
    return ParameterTier(DiskPlace(state_pool), window_bytes=WINDOW_BYTES, min_bytes=4 * KIB)


# When they leave.


def test_parameters_leave_from_when_the_process_outgrows_the_budget(
    tier: ParameterTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_bytes = 100 << 20
    monkeypatch.setattr(parameter_building, "process_bytes", lambda: held_bytes)
    with Building(leaves_no_room(200 << 20, WINDOW_BYTES), lambda: tier) as building:
        first = GPT()
        assert building.tier is None
        held_bytes = 190 << 20
        second = GPT()
        assert building.tier is tier
    # Those that were built before as well: nobody uses them now.
    assert on_disk(first) == large(first)
    assert on_disk(second) == large(second)


def test_it_says_with_which_budget_they_would_have_stayed(tier: ParameterTier, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []

    def process_bytes() -> int:
        return (100 << 20) + sum(parameter.nbytes for model in made for parameter in model.parameters())

    monkeypatch.setattr(parameter_building, "process_bytes", process_bytes)

    def built(budget_bytes: int) -> tuple[int, int]:
        """Returns from which budget on models stay, and how many parameters have left."""
        made.clear()
        with Building(leaves_no_room(budget_bytes, WINDOW_BYTES), lambda: tier) as building:
            for _ in range(3):
                made.append(GPT())
            return building.stays_from_bytes, sum(len(on_disk(model)) for model in made)

    stays_from_bytes, num_left = built(1 << 20)
    assert num_left > 0
    assert built(stays_from_bytes) == (0, 0)
    # It is no more than that, but for the parameters that are being made.
    assert built(stays_from_bytes - 2 * sum(parameter.nbytes for parameter in GPT().parameters()))[1] > 0


def test_a_model_smaller_than_what_passes_through_memory_stays(
    tier: ParameterTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_building, "process_bytes", lambda: 1 << 50)
    with Building(leaves_no_room(1 << 20, 16 << 20), lambda: tier) as building:
        assert on_disk(GPT()) == set()
    assert building.tier is None


def test_modules_are_as_before_when_it_ends(tier: ParameterTier) -> None:
    copies = nn.Parameter.__deepcopy__
    for _ in range(2):
        building = Building(lambda _: True, lambda: tier)
        assert nn.Parameter.__deepcopy__ is not copies
        building.end()
        building.end()
        assert nn.Parameter.__deepcopy__ is copies
    assert on_disk(GPT()) == set()


# What scripts do with a model before they train it.


def cast(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def cast_twice(model: nn.Module) -> nn.Module:
    return model.half().to("cpu").float()


def drawn_again(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data.uniform_(-0.05, 0.05)
    return model.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.LayerNorm) else None)


def loaded(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    model.load_state_dict(copy.deepcopy(GPT().state_dict()))
    return model


def loaded_in_place_of_its_own(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    model.load_state_dict(copy.deepcopy(GPT().state_dict()), assign=True)
    model.get_submodule("head").weight = model.get_submodule("tokens").weight
    return model


def looked_at(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.eval()(torch.zeros(1, 4, dtype=torch.int64))
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert str(next(model.parameters())).startswith("Parameter")
    assert len(model.state_dict()) == len(GPT().state_dict())
    return model.train()


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def wrapped(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def encoder(_: nn.Module) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 4)


@pytest.mark.parametrize(
    "prepare",
    [cast, cast_twice, drawn_again, loaded, loaded_in_place_of_its_own, looked_at, copied, wrapped, encoder],
)
def test_it_has_the_same_bits_and_is_on_disk_after(
    prepare: Callable[[nn.Module], nn.Module], tier: ParameterTier
) -> None:
    torch.manual_seed(0)
    plain = prepare(GPT())
    drawn = torch.rand(3)
    torch.manual_seed(0)
    with Building(lambda _: True, lambda: tier):
        model = prepare(GPT())
    assert torch.equal(torch.rand(3), drawn)
    assert tier.resident_bytes <= WINDOW_BYTES + LARGEST_BYTES
    assert on_disk(model) == large(model)
    found = dict(model.named_parameters())
    assert [n for n, p in plain.named_parameters() if found[n].dtype != p.dtype or not torch.equal(found[n], p)] == []


def made_of_its_own(model: nn.Module) -> nn.Module:
    """A parameter is made of another one."""
    block = model.get_submodule("layers.1")
    block.up.weight = nn.Parameter(block.up.weight)
    model.positions = nn.Embedding.from_pretrained(model.get_parameter("positions.weight"), freeze=False)
    return model


def parametrized(model: nn.Module) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model.get_submodule("layers.1.up"))
    return model


@pytest.mark.parametrize("prepare", [made_of_its_own, parametrized])
def test_a_parameter_may_be_made_of_one_that_has_left(
    prepare: Callable[[nn.Module], nn.Module], tier: ParameterTier
) -> None:
    """They share memory, as ever, which therefore stays."""
    torch.manual_seed(0)
    plain = prepare(GPT())
    torch.manual_seed(0)
    with Building(lambda _: True, lambda: tier):
        model = prepare(GPT())
    found, expected = everything(model), everything(plain)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert len(on_disk(model)) > 8


def test_memory_that_torch_did_not_allocate_stays_where_it_is(tier: ParameterTier) -> None:
    """GIVEN a parameter over an array of numpy WHEN the array is written to later THEN the parameter has that."""
    array = numpy.zeros((64, 64), dtype=numpy.float32)
    with Building(lambda _: True, lambda: tier):
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.from_numpy(array))
        model = GPT()
    array[:] = 1.0
    assert on_disk(holder) == set()
    assert torch.equal(holder.weight, torch.ones(64, 64))
    assert on_disk(model) == large(model)


def test_what_other_threads_build_stays_in_memory(tier: ParameterTier) -> None:
    """They may write to it at any moment."""
    with Building(lambda _: True, lambda: tier), ThreadPoolExecutor(4) as threads:
        models = [future.result() for future in [threads.submit(GPT) for _ in range(8)]]
        own = GPT()
    assert [on_disk(model) for model in models] == [set()] * 8
    assert on_disk(own) == large(own)


def test_many_small_parameters_cost_what_each_costs(tier: ParameterTier) -> None:
    """What waits is not gone through again for each new one."""
    with Building(lambda _: True, lambda: tier) as building:
        model = nn.ParameterList(nn.Parameter(torch.empty(16)) for _ in range(400))
        assert len(building._waiting) * 64 <= tier.window_bytes
        assert building._waiting_bytes == 64 * len(building._waiting)
    assert on_disk(model) == set()


def test_models_that_a_script_drops_do_not_pile_up_on_disk(tier: ParameterTier) -> None:
    with Building(lambda _: True, lambda: tier):
        for _ in range(40):
            GPT()
    assert tier.place.pool.scratch.used_bytes < 16 * sum(p.nbytes for p in GPT().parameters())


def test_what_a_script_no_longer_has_gives_its_disk_space_back(tier: ParameterTier) -> None:
    with Building(lambda _: True, lambda: tier):
        model = GPT()
        GPT()
    whole_bytes = tier.place.pool.scratch.used_bytes
    tier.forget_unused()
    assert tier.place.pool.scratch.used_bytes < 0.6 * whole_bytes
    assert {id(member.parameter) for member in tier} == {
        id(p) for name, p in model.named_parameters() if name in large(model)
    }


def resident_file_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * KIB


@pytest.mark.slow
def test_of_a_checkpoint_that_is_mapped_no_pages_stay_in_memory(tier: ParameterTier, tmp_path: Path) -> None:
    """GIVEN weights that are a mapped file's WHEN they leave for the disk THEN the file's pages leave memory, too."""
    torch.save(nn.Linear(4096, 1000).state_dict(), tmp_path / "checkpoint.pt")
    with Building(lambda _: True, lambda: tier):
        model = nn.Linear(4096, 1000)
        checkpoint = torch.load(tmp_path / "checkpoint.pt", mmap=True)
        model.load_state_dict(checkpoint, assign=True)
        del checkpoint  # the bias, which is small, holds the file's map
        expected = model.weight.detach().clone()
        before = resident_file_bytes()
    assert on_disk(model) == {"weight"}
    # At both ends there may be pages that the file cache keeps together with what lies beside them.
    assert before - resident_file_bytes() > 0.5 * expected.nbytes
    assert torch.equal(model.weight, expected)


def test_parameters_in_shared_memory_stay(tier: ParameterTier) -> None:
    with Building(lambda _: True, lambda: tier):
        model = GPT().share_memory()
    assert on_disk(model) == set()
    assert all(parameter.is_shared() for parameter in model.parameters())
