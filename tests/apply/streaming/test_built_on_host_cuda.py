"""A model that is larger than its budget on a CUDA device is built there all the same, trains there, and is saved."""

import gc
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.errors import ApplyError
from memwall.session.session import Session

pytestmark = [pytest.mark.phantom(card="a100-80gb", context_bytes=32 << 20), pytest.mark.timeout(300)]
KIB, MIB = 1 << 10, 1 << 20
WIDTH, NUM_LAYERS = 512, 64
CONTEXT_BYTES, BUDGET_BYTES, HOST_BYTES = 32 * MIB, 80 * MIB, 1 << 30


def built(how: str) -> nn.Module:
    """Makes a model of 64 MiB on the device, or moves it there."""
    torch.manual_seed(0)
    if how == "made there":
        with torch.device("cuda"):
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).cuda()


def trained(how: str, keeper: ParameterKeeper | None) -> dict[str, Tensor]:
    """Returns what is saved after two steps, and loaded once in between."""
    allocator = AllocatorHandler()
    with ExitStack() as closing:
        if keeper is not None:
            keeper.watch_building(BUDGET_BYTES, allocator, lambda: HOST_BYTES)
        model = built(how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if keeper is not None:  # as a first step begins
            assert keeper.spill_recorded(
                model, [optimizer], allocator, budget_bytes=BUDGET_BYTES, host_limit_bytes=HOST_BYTES
            )
            _, close = open_optimizer_state(
                optimizer,
                tier="host",
                disk=None,
                capacity_bytes=None,
                host_limit_bytes=HOST_BYTES,
                resident_bytes=0,
                bucket_bytes=2 * MIB,
                min_bytes=64 * KIB,
                around_step=keeper.around_step,
            )
            closing.callback(close)
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = model.state_dict()
            where = {value.device.type for name, value in saved.items() if name.endswith("weight")}
            assert where == {"cuda" if keeper is None else "cpu"}
            model.load_state_dict(saved)
        peak_bytes = torch.cuda.max_memory_reserved()
        assert keeper is None or peak_bytes + CONTEXT_BYTES <= BUDGET_BYTES < NUM_LAYERS * MIB + CONTEXT_BYTES
        torch.cuda.set_per_process_memory_fraction(1.0)  # for what comes back
    return {name: value.cpu() for name, value in saved.items()}


@pytest.mark.parametrize("how", ["made there", "moved"])
def test_it_trains_and_is_saved_in_less_than_its_parameters_take(how: str) -> None:
    expected = trained(how, None)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((BUDGET_BYTES - CONTEXT_BYTES) / total_bytes)  # as on a smaller card
    keeper = ParameterKeeper(None, None)
    try:
        found = trained(how, keeper)
    finally:
        keeper.bring_back()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.phantom(card="a100-80gb", context_bytes=32 << 20, devices=2)
def test_one_that_is_built_on_another_device_comes_back_there() -> None:
    """GIVEN a script whose present device is the first WHEN it builds on the second THEN that one's room counts."""
    place = torch.device("cuda", 1)
    keeper = ParameterKeeper(None, None)
    keeper.watch_building(BUDGET_BYTES, AllocatorHandler(), lambda: HOST_BYTES)
    try:
        with place:
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        held_bytes = torch.cuda.memory_reserved(place) + CONTEXT_BYTES
        used = model(torch.ones(4, WIDTH, device=place)).device
    finally:
        keeper.bring_back()
    assert held_bytes <= BUDGET_BYTES < NUM_LAYERS * MIB + CONTEXT_BYTES
    assert (used, {parameter.device for parameter in model.parameters()}) == (place, {place})


@pytest.mark.leaves_changed  # its parameters stay where they are: they have no room
@pytest.mark.phantom(card="a100-80gb", context_bytes=32 << 20, memory_bytes=80 << 20)
def test_one_that_has_to_be_on_the_device_as_a_whole_is_refused_before_its_first_step() -> None:
    """GIVEN an optimizer that steps all parameters at once WHEN the card has no room for them THEN that is said."""
    session = Session(budget_bytes=BUDGET_BYTES)
    session.watch_building()  # as `memwall run` does
    model = built("moved")
    session.attach(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ApplyError, match=r"went to host memory while the script built them.*LBFGS.*a budget above"):
        model(torch.ones(4, WIDTH, device="cuda"))
    session.close(completed=False, brings_back=False)
