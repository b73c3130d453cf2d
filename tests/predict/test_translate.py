"""From a CPU step to the step of a CUDA device: the table of rules, and those that change the records."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import RULES, not_modelled, recording_for, translated
from memwall.predict.cuda.workspaces import FORMULAS
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_rule_has_a_name_of_its_own_and_a_source() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all("/" in rule.source or "moved there" in rule.source for rule in RULES)
    assert set(FORMULAS) <= set(names)


def test_a_switch_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^there is no translation rule 'flash'; there are attention-kernel, dropout"):
        recording_for(hardware_named("l4"), without=("flash",))


class Everything(nn.Module):
    """Something of all that any rule is about."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.drop = nn.Embedding(500, 64), nn.RMSNorm(64), nn.Dropout(0.25)
        self.layer = nn.Linear(64, 3 * 64)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.words(words)))
        parts = self.layer(hidden).view(*words.shape, 4, -1).transpose(1, 2).chunk(3, dim=-1)
        picked = F.scaled_dot_product_attention(*parts)[:, :, torch.arange(8)]
        return picked.softmax(-1)


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_rule_changes_a_step_and_its_switch_leaves_that_out(
    rule: str, workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """Of three steps, whose attention takes another kernel each, at least one is another without the rule alone."""

    def steps(device: str, is_cast: bool, *without: str) -> list[Step]:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_cast):
                return model(batch).float().sum()

        workload = workload_of(
            Everything, lambda: torch.zeros(1, 4096, dtype=torch.int64), loss=loss, optimizer=torch.optim.AdamW
        )
        found = recorded(workload, device, *without).steps
        return [msgspec.structs.replace(step, wall_seconds=0.0) for step in found]

    cases = (("a100-80gb", False), ("a100-80gb", True), ("h100-80gb", True))
    with_all = [steps(*case) for case in cases]
    assert with_all == [steps(*case) for case in cases]
    assert with_all != [steps(*case, rule) for case in cases]


def test_optimizers_left_to_torch_are_foreach(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    def is_foreach(*without: str) -> bool:
        workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8), optimizer=torch.optim.AdamW)
        return any("_foreach_" in name for name in recorded(workload, "a100-80gb", *without).names)

    assert is_foreach()
    assert not is_foreach("foreach-optimizer")


@pytest.mark.parametrize(
    ("device", "nbytes"),
    [
        ("h100-80gb", 32 * MIB),
        ("b200", 32 * MIB),
        ("rtx-5090", 32 * MIB),
        ("a100-80gb", 8_519_680),
        ("t4", 8_519_680),
        ("mi300x", 128 * MIB),
    ],
)
def test_cublas_holds_a_workspace_per_thread(
    device: str,
    nbytes: int,
    workload_of: Callable[..., Workload],
    recorded: Callable[..., Trace],
    numbers_of: Callable[..., list[int]],
) -> None:
    """One from forward's first product on, one from backward's; they are still there in later steps."""
    workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8))
    trace = recorded(workload, device)
    first, steady = trace.steps
    births = [s.birth for s in first.storages if s.nbytes == nbytes]
    assert births == [
        numbers_of(trace, first, "addmm")[0],
        next(n for n in numbers_of(trace, first, "mm") if first.ops[n].phase == "backward"),
    ]
    assert [(s.birth, s.death) for s in steady.storages if s.nbytes == nbytes] == [(-1, len(steady.ops))] * 2
    without = recorded(workload, device, "cublas-workspace")
    assert not [s for step in without.steps for s in step.storages if s.nbytes == nbytes]


def test_step_counters_stay_on_the_host_unless_fused(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    def devices(*without: str, **options: Any) -> set[str]:
        workload = workload_of(
            lambda: nn.Linear(8, 8),
            lambda: torch.ones(2, 8),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, **options),
        )
        step = recorded(workload, "a100-80gb", *without).steps[-1]
        return {s.device for s in step.storages if s.category == "optimizer_state" and s.nbytes <= 8}

    assert devices() == {"cpu"}
    assert devices(fused=True) == {"cuda"}
    assert devices("host-counters") == {"cuda"}


def test_tensors_are_on_the_device(workload_of: Callable[..., Workload], recorded: Callable[..., Trace]) -> None:
    workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8))
    trace = recorded(workload, "a100-80gb")
    assert trace.device == "cuda"
    assert {s.device for step in trace.steps for s in step.storages} == {"cuda"}
    assert recorded(workload, "a100-80gb", "device-names").device == "cpu"


def test_a_live_trace_gets_the_rules_on_records_and_says_what_it_lacks(
    workload_of: Callable[..., Workload], numbers_of: Callable[..., list[int]]
) -> None:
    workload = workload_of(lambda: nn.Linear(64, 64), lambda: torch.ones(16, 64))
    hardware = hardware_named("a100-80gb")
    live = record(workload)
    trace = translated(live, hardware)
    assert trace.device == "cuda"
    assert trace.base_bytes == hardware.context_bytes[0]
    (number,) = numbers_of(trace, trace.steps[0], "addmm")
    product_bytes = 4 * (16 * 64 + 64 * 64 + 64 + 16 * 64)
    assert trace.steps[0].ops[number].seconds == product_bytes / hardware.memory_bytes_per_second
    assert any("machine that recorded the trace" in line for line in not_modelled(trace, hardware))
    assert translated(trace, hardware).steps == trace.steps


def test_what_is_not_modelled_is_named_where_the_trace_calls_for_it(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """torch.compile and communicators always, those with their published range; convolutions where there are any."""
    hardware = hardware_named("a100-80gb")
    linear = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8))
    convolution = workload_of(lambda: nn.Conv2d(3, 8, 3), lambda: torch.ones(1, 3, 8, 8))
    without, with_convolution = (
        " ".join(not_modelled(recorded(workload, "a100-80gb"), hardware)) for workload in (linear, convolution)
    )
    for text in (without, with_convolution):
        assert "torch.compile" in text
        assert "each communicator holds 518.8 MiB to 1.49 GiB more on each of them, as published" in text
    sources = hardware.sources | {"communicator_bytes": "measured on cuda:0, cuda:1 of this machine"}
    at_hand = msgspec.structs.replace(hardware, communicator_bytes=(1 << 30, 1 << 30), sources=sources)
    measured = " ".join(not_modelled(recorded(linear, "a100-80gb"), at_hand))
    assert "each communicator holds 1.00 GiB more on each of them, measured on cuda:0, cuda:1 of this mach" in measured
    assert "cuDNN's convolutions" not in without
    assert "recurrent" not in without
    assert "workspaces of cuDNN's convolutions" in with_convolution


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, nn.LSTMCell])
def test_recurrent_layers_are_named_however_a_cpu_runs_them(
    layer: Callable[..., nn.Module], workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """A CPU has an operator for some, and takes others to pieces; CUDA has cuDNN and fused cells for them."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch)[0].sum()  # type: ignore[no-any-return]

    workload = workload_of(lambda: layer(8, 8), lambda: torch.ones(4, 8), loss=loss)
    assert any("recurrent" in line for line in not_modelled(recorded(workload, "l4"), hardware_named("l4")))
