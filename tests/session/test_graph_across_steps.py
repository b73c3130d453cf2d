"""A graph that is built in one step and goes backward in a later one, as a generator's around its discriminator's."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from block_models import WIDTH, Block, offload
from plans import plan_of
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import memwall
from memwall.errors import UsageError

ROWS = 8192
"""So many that what a block saves is worth parking: 2 MiB and more a tensor."""


def gradients(*, under: str, tmp_path: Path) -> list[torch.Tensor]:
    """Of a generator, in three steps of a discriminator."""
    torch.manual_seed(0)
    generator, discriminator = Block(), nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    found = []

    def loop() -> None:
        for _ in range(3):
            discriminator(torch.ones(ROWS, WIDTH)).square().mean().backward()
            made = generator(torch.ones(ROWS, WIDTH))
            discriminator(made.detach()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            discriminator(made).mean().backward()
            found.extend(parameter.grad.clone() for parameter in generator.parameters())

    asked = {"a budget": {"budget": "64GiB"}, "a plan": {"plan": plan_of(discriminator, offload("0"), offload("1"))}}
    if under == "nothing":
        loop()
    else:
        with memwall.fit(discriminator, optimizer, disk=str(tmp_path), **asked[under]):
            loop()
    return found


def await_threads(number: int) -> None:
    """Returns once there are no more threads than that."""
    until = time.monotonic() + 10
    while threading.active_count() > number:
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("under", ["a budget", "a plan"])
def test_its_backward_finds_what_was_parked(under: str, tmp_path: Path) -> None:
    plain = gradients(under="nothing", tmp_path=tmp_path)
    found = gradients(under=under, tmp_path=tmp_path)
    assert len(found) == len(plain) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.slow
def test_what_was_parked_goes_with_the_graph(tmp_path: Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with memwall.fit(model, optimizer, budget="64GiB", disk=str(tmp_path)) as session:
        held = model(torch.ones(ROWS, WIDTH))
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        session.end_step()
    assert threading.active_count() > threads
    held.sum()  # its graph outlives the session
    del held
    await_threads(threads)
    assert len(os.listdir("/proc/self/fd")) == files
    assert not list(tmp_path.iterdir())


def test_after_an_error_threads_and_files_go_once_nobody_holds_the_error(tmp_path: Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        out = model(torch.ones(ROWS, WIDTH))
        raise ValueError(f"a shape of {tuple(out.shape)} is not expected")

    def run() -> None:
        with memwall.fit(model, optimizer, budget="64GiB", disk=str(tmp_path)):
            train()

    with pytest.raises(ValueError, match="is not expected") as caught:
        run()
    assert threading.active_count() > threads  # the frames of the error hold what a backward would need
    del caught
    await_threads(threads)
    assert len(os.listdir("/proc/self/fd")) == files
    assert not list(tmp_path.iterdir())


def test_a_session_closes_in_another_thread_than_it_trained_in_and_hides_no_error(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    thread = threading.Thread(target=lambda: model(torch.ones(ROWS, WIDTH)))

    def run() -> None:
        with memwall.fit(model, optimizer, budget="64GiB", disk=str(tmp_path)):
            thread.start()
            thread.join()
            raise UsageError("the script's model and memwall's are not the same")

    with pytest.raises(UsageError, match="are not the same"):
        run()
    assert not _get_current_dispatch_mode_stack()


def forecast_bytes(*, retains: bool, is_later: bool, tmp_path: Path) -> tuple[int, int]:
    """Returns, for a loop whose variable holds a graph, the steady step's peak, and what the graph's tensors are."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_later:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with memwall.fit(model, optimizer, budget="64GiB", disk=str(tmp_path)) as session:
        for _ in range(2):
            loss = model(torch.ones(ROWS, WIDTH)).square().mean()
            loss.backward(retain_graph=retains)
            optimizer.step()
            optimizer.zero_grad()
    assert session.plan is not None
    assert session.trace is not None
    saved = {save.storage for save in session.trace.steps[0].saved}
    graph = [one for index, one in enumerate(session.trace.steps[0].storages) if index in saved]
    graph_bytes = sum(one.nbytes for one in graph if one.category == "activation")
    return session.plan.forecast.peak.allocated_bytes, graph_bytes


@pytest.mark.slow
@pytest.mark.parametrize("is_later", [False, True], ids=["a first step", "a later one"])
def test_a_graph_that_is_retained_is_there_twice_in_the_next_step(is_later: bool, tmp_path: Path) -> None:
    """GIVEN backward(retain_graph=True) WHEN the next forward ends THEN the loop's variable still holds the graph."""
    (held_bytes, graph_bytes), (let_go_bytes, _) = (
        forecast_bytes(retains=retains, is_later=is_later, tmp_path=tmp_path) for retains in (True, False)
    )
    assert held_bytes >= 2 * graph_bytes > let_go_bytes > graph_bytes
