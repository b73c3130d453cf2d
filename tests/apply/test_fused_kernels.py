"""Fused kernels as an action: recorded, planned, applied, measured, and the model itself again afterwards."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from language_model import PATHS, VOCABULARY, LanguageModel, Norm, language_model, tokens, workload
from plans import plan_of
from torch import Tensor, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState

from memwall.apply.kernels.head import chunk_rows_of
from memwall.apply.kernels.patched import apply_kernels
from memwall.errors import ApplyError, InfeasibleError
from memwall.integrations.fused_kernels import recorded_with_kernels
from memwall.planning.recordings import Recordings
from memwall.planning.search import plan
from memwall.planning.techniques.kernels import FusedKernels
from memwall.predict.curve import live_peak_bytes
from memwall.session.fit import fit
from memwall.session.session import Session
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

FUSED = FusedKernels(modules=PATHS, chunk_rows=256)


def with_kernels() -> tuple[Trace, FusedKernels | None]:
    return recorded_with_kernels(lambda changed: record(changed(workload())))


def train(model: LanguageModel, session: Session | None = None, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if session is not None:
        session.attach(model, optimizer)
    losses = []
    for _ in range(num_steps):
        loss = model(tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def is_itself(model: nn.Module) -> bool:
    return not [module for module in model.modules() if "forward" in module.__dict__]


@contextmanager
def allocated() -> Iterator[Callable[[], int]]:
    """The highest bytes that torch's allocator held within, beyond those it held before: measured, not modelled."""
    peak_bytes = 0
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
    )
    try:
        yield lambda: peak_bytes
    finally:
        live_bytes = 0
        for thread in _disable_profiler_legacy():
            for event in thread:
                if str(event.kind()) == "memory_alloc":
                    live_bytes += event.cpu_memory_usage()
                    peak_bytes = max(peak_bytes, live_bytes)


def measured_peak_bytes(action: FusedKernels | None) -> int:
    """Of a plain step in a steady state, with what stands before it."""
    model = language_model()
    if action is not None:
        apply_kernels(model, action.modules, action.chunk_rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    standing = 3 * sum(parameter.nbytes for parameter in model.parameters())
    with allocated() as peak_bytes:
        step()
    return standing + peak_bytes()


def test_the_step_that_is_planned_from_is_the_one_that_runs() -> None:
    """GIVEN the step recorded with kernels THEN its bytes are those of a real one, and far below the plain step's."""
    plain, (fused, action) = record(workload()), with_kernels()
    assert action == FusedKernels(modules=PATHS, chunk_rows=256)
    predicted = {None: live_peak_bytes(steady_step(plain), "cpu"), action: live_peak_bytes(steady_step(fused), "cpu")}
    for found, num_bytes in predicted.items():
        assert abs(measured_peak_bytes(found) - num_bytes) <= 0.005 * num_bytes
    # The loss alone holds more in the plain step than all logits take.
    assert predicted[None] - predicted[action] > 8 * 64 * VOCABULARY * 4


def test_a_plan_has_them_where_recomputing_would_cost_time() -> None:
    """GIVEN a budget that the plain step has no room for THEN kernels are planned, with what they free of its peak."""
    plain, fused = record(workload()), with_kernels()
    (fused_trace, action) = fused
    assert action is not None
    budget = plan(fused_trace, budget="1TiB").forecast.peak.process_bytes + (16 << 20)
    found = plan(
        plain, budget=budget, allow=("kernels",), recordings=Recordings(frozenset({"kernels"}), lambda _: fused)
    )
    kernels = next(a for a in found.actions if isinstance(a, FusedKernels))
    saved = live_peak_bytes(steady_step(plain), "cpu") - live_peak_bytes(steady_step(fused_trace), "cpu")
    assert kernels.saved_bytes == saved
    assert kernels.modules == action.modules
    assert found.forecast.fits
    assert found.forecast.plain_peak is not None
    assert found.forecast.plain_peak.allocated_bytes == live_peak_bytes(steady_step(plain), "cpu")


def test_they_are_not_looked_for_where_nobody_allowed_them_or_the_step_fits() -> None:
    trace = record(workload())

    def record_again(_: frozenset[str]) -> tuple[Trace, FusedKernels | None]:
        raise AssertionError("recorded with kernels for no reason")

    recordings = Recordings(frozenset({"kernels"}), record_again)

    assert plan(trace, budget="1TiB", allow=("kernels",), recordings=recordings).actions == ()
    tight = trace.base_bytes + live_peak_bytes(steady_step(trace), "cpu")
    assert not any(isinstance(a, FusedKernels) for a in plan(trace, budget=tight, recordings=recordings).actions)


def test_a_session_trains_the_same_model_with_them() -> None:
    """GIVEN kernels are allowed THEN they run from the first step on, to the same weights but for rounding."""
    own, ours = language_model(), language_model()
    losses = train(own)
    session = fit(ours, optimizer := torch.optim.AdamW(ours.parameters(), lr=1e-3), budget="1TiB", allow=["kernels"])
    with session:
        for expected in losses:
            loss = ours(tokens())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert abs(float(loss.detach()) - expected) <= 1e-5 * expected
        assert not is_itself(ours)
    assert session.plan is not None
    assert session.plan.actions == (FUSED,)
    assert is_itself(ours)
    with torch.no_grad():
        for mine, plain in zip(ours.parameters(), own.parameters(), strict=True):
            assert (mine - plain).norm() <= 1e-3 * plain.norm()


def test_parameters_on_disk_have_no_kernels(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """GIVEN a budget without room for gradients THEN parameters are on disk in the recorded step, without kernels."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = fit(model, optimizer, budget="1MiB", allow=["kernels"], disk=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        loss = model(tokens())
        assert type(model.norm.forward(torch.ones(1, 64)).grad_fn).__name__ == "MulBackward0"
        loss.backward()
        optimizer.step()
        with pytest.raises(InfeasibleError):
            session.end_step()
        session.close(completed=False)
    assert "kernels are allowed, but no fused kernels run: the budget has no room for the parameters" in caplog.text
    assert is_itself(model)


def test_a_loss_that_needs_its_logits_keeps_them_and_the_rest_is_planned() -> None:
    """GIVEN a loss that weighs tokens THEN the plan has the modules, and leaves the loss as it is."""
    model = language_model(is_weighted=True)
    with (session := Session(budget_bytes=1 << 40, allow=("kernels",))):
        train(model, session)
    assert session.plan is not None
    assert session.plan.actions == (FusedKernels(modules=PATHS),)
    assert is_itself(model)


def test_evaluation_and_generation_get_logits_that_are_there() -> None:
    model = language_model()
    x = torch.randn(2, 64)
    expected = model.lm_head(x)
    with (session := Session(plan=plan_of(model, FUSED))):
        train(model, session, num_steps=2)
        assert type(model.lm_head(x)) is not torch.Tensor
        with torch.no_grad():
            assert type(model.lm_head(x)) is torch.Tensor
        assert type(model.eval().lm_head(x)) is torch.Tensor
    assert type(model.lm_head(x)) is type(expected) is torch.Tensor


class Scale(Norm):
    """Looks like a norm and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.parametrize(
    ("norm", "paths", "found"),
    [
        (Norm(), ("norm", "layers.2.norm"), r"layers\.2\.norm among them: no module of a kernel's structure is there"),
        (
            Scale(),
            PATHS,
            r"for 5 modules of LanguageModel, and 1 cannot have one, layers\.1\.norm among them",
        ),
    ],
)
def test_a_plan_whose_kernels_do_not_fit_the_model_is_refused_and_changes_nothing(
    norm: nn.Module, paths: tuple[str, ...], found: str
) -> None:
    model = language_model()
    model.layers[1].norm = norm
    action = FusedKernels(modules=paths)
    session = Session(plan=plan_of(model, action))
    with pytest.raises(ApplyError, match=found), session:
        train(model, session, num_steps=1)
    assert is_itself(model)


def test_chunks_take_no_more_room_than_the_heads_gradient() -> None:
    wide = nn.Module()
    wide.lm_head = nn.Linear(2048, 128256, bias=False, device="meta")
    assert chunk_rows_of(wide) == 2048
    assert chunk_rows_of(language_model()) == 256
    assert chunk_rows_of(nn.Linear(4, 4)) == 0
