"""A graph that is built in one step and goes backward in a later one, as a generator's around its discriminator's."""

import os
import threading
from pathlib import Path

import pytest
import torch
from block_models import WIDTH, Block, offload
from plans import plan_of
from torch import nn

import memwall
from memwall.apply.offload.parking import close_unneeded

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


@pytest.mark.parametrize("under", ["a budget", "a plan"])
def test_its_backward_finds_what_was_parked(under: str, tmp_path: Path) -> None:
    plain = gradients(under="nothing", tmp_path=tmp_path)
    found = gradients(under=under, tmp_path=tmp_path)
    assert len(found) == len(plain) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


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
    close_unneeded()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert not list(tmp_path.iterdir())
