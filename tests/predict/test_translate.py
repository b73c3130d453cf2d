"""From a CPU step to the step of a CUDA device: what changes of the records, and what is left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import not_modelled, translated
from memwall.trace.records import Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


def test_optimizers_left_to_torch_are_foreach(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    def is_foreach() -> bool:
        workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8), optimizer=torch.optim.AdamW)
        return any("_foreach_" in name for name in recorded(workload, "a100-80gb").names)

    assert is_foreach()


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


def test_in_torch_2_11_cublaslt_has_a_workspace_of_its_own(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN that release THEN the first product with a bias takes 1 MiB, for good; a product without has none."""

    def held(bias: bool) -> list[tuple[int, int]]:
        monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
        steps = recorded(workload_of(lambda: nn.Linear(8, 8, bias=bias), lambda: torch.ones(2, 8)), "h100-80gb").steps
        return [(s.birth, s.death == len(step.ops)) for step in steps for s in step.storages if s.nbytes == MIB]

    assert [is_kept for _, is_kept in held(bias=True)] == [True, True]
    assert held(bias=True)[1] == (-1, True)
    assert held(bias=False) == []


def test_step_counters_stay_on_the_host_unless_fused(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    def devices(**options: Any) -> set[str]:
        workload = workload_of(
            lambda: nn.Linear(8, 8),
            lambda: torch.ones(2, 8),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, **options),
        )
        step = recorded(workload, "a100-80gb").steps[-1]
        return {s.device for s in step.storages if s.category == "optimizer_state" and s.nbytes <= 8}

    assert devices() == {"cpu"}
    assert devices(fused=True) == {"cuda"}


def test_what_a_number_is_copied_from_is_in_host_memory(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """`torch.tensor(0.0)`, which starts each counter, has the value in a tensor of its own for the moment."""
    workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8), optimizer=torch.optim.AdamW)
    trace = recorded(workload, "a100-80gb")
    lifted = [op for op in trace.steps[0].ops if trace.names[op.name] == "aten.lift_fresh.default"]
    assert lifted
    assert {trace.steps[0].storages[index].device for op in lifted for index in op.inputs} == {"cpu"}


def test_tensors_are_on_the_device(workload_of: Callable[..., Workload], recorded: Callable[..., Trace]) -> None:
    workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8))
    trace = recorded(workload, "a100-80gb")
    assert trace.device == "cuda"
    assert {s.device for step in trace.steps for s in step.storages} == {"cuda"}


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
    assert "cuDNN's convolutions" not in without
    assert "recurrent" not in without
    assert "workspaces of cuDNN's convolutions" in with_convolution


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, nn.LSTMCell])
def test_what_is_assumed_of_recurrent_layers_is_named_and_all_that_a_cpu_ran_of_them(
    layer: Callable[..., nn.Module], workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """GIVEN a step as CUDA runs it THEN cuDNN's layers are named, and of a fused cell there is nothing to say."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch)[0].sum()  # type: ignore[no-any-return]

    workload, hardware = workload_of(lambda: layer(8, 8), lambda: torch.ones(4, 8), loss=loss), hardware_named("l4")
    said = [line for line in not_modelled(recorded(workload, "l4"), hardware) if "recurrent" in line]
    assert [line for line in said if "assumed" in line] == said
    assert bool(said) == (layer is not nn.LSTMCell)
    live = translated(record(workload), hardware)
    assert "cuDNN's recurrent layers, and fused recurrent cells" in not_modelled(live, hardware)
