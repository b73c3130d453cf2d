"""Bytes are named by the user's line that made them, in forward and backward; where it is not known, none is named."""

import inspect
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_steps import record_fake
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memwall.predict.curve import peak_of
from memwall.trace.file import save_trace
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

KIB = 1 << 10
FLOAT_BYTES = 4

pytestmark = pytest.mark.usefixtures("one_thread")


class Wide(nn.Module):
    """Each line of forward makes a result of its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = torch.sin(h)
        w = h.repeat(1, 16)  # planted
        return self.down(w.tanh()[:, :64])


class Fill(torch.autograd.Function):
    """Backward makes a tensor by itself, in Python of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + torch.ones(16, 8)  # in backward


def line_with(text: str, of: Any) -> str:
    """`path:line function` of the one line of a function that has a text."""
    lines, first = inspect.getsourcelines(of)
    (number,) = [first + k for k, line in enumerate(lines) if text in line]
    path = Path(inspect.getfile(of))
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown.as_posix()}:{number} {of.__name__}"


def made_by(trace: Trace, step: Step, line: str, phase: str) -> Counter[int]:
    """Sizes of what a line made in a phase."""
    return Counter(s.nbytes for s in step.storages if s.line >= 0 and trace.lines[s.line] == line and s.phase == phase)


def workload(model: Callable[[], nn.Module]) -> Workload:
    return Workload(
        model=model,
        batch=lambda: torch.ones(16, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


class TestForward:
    def test_a_planted_line_is_named_with_its_bytes(self) -> None:
        trace = record(workload(Wide))
        made = made_by(trace, trace.steps[1], line_with("# planted", Wide.forward), "forward")
        assert made[16 * 64 * 16 * FLOAT_BYTES] == 1

    def test_the_peak_names_it_and_every_byte_has_a_holder(self) -> None:
        trace = record(workload(Wide))
        peak = peak_of(trace, trace.steps[1])
        held = {share.name: share for share in peak.by_line}
        assert sum(share.num_bytes for share in peak.by_line) == peak.live_bytes
        saved = held[line_with("w.tanh()", Wide.forward)]
        assert saved.num_bytes >= 64 * KIB
        assert "activation" in saved.categories
        assert held["(parameter)"].num_bytes == sum(p.nbytes for p in Wide().parameters())

    def test_fake_and_live_recordings_have_the_same_lines(self) -> None:
        live, fake = record(workload(Wide)), record_fake(workload(Wide))
        named = [
            {trace.lines[s.line] for s in trace.steps[1].storages if s.line >= 0 and s.nbytes > KIB}
            for trace in (live, fake)
        ]
        assert named[0] == named[1]
        assert len(named[0]) >= 4

    def test_what_runs_the_step_is_no_line_of_the_users(self) -> None:
        """Neither this test nor the runner of tests called the model: the recording did."""
        trace = record(workload(Wide))
        here = Path(__file__).name
        assert trace.lines
        assert all(here in line for line in trace.lines)
        assert not [line for line in trace.lines if "test_what" in line]


class TestBackward:
    def test_a_temporary_has_the_line_of_the_operation_it_is_the_backward_of(self) -> None:
        trace = record(workload(Wide))
        step = trace.steps[1]
        assert made_by(trace, step, line_with("w.tanh()", Wide.forward), "backward")[16 * 64 * 16 * FLOAT_BYTES] >= 1
        weight_bytes = 8 * 64 * FLOAT_BYTES
        assert made_by(trace, step, line_with("self.up(x)", Wide.forward), "backward")[weight_bytes] == 1

    def test_pythons_own_backward_has_its_own_line(self) -> None:
        class Custom(Wide):
            def forward(self, x: Tensor) -> Tensor:
                return Fill.apply(self.down(self.up(x)))  # type: ignore[no-any-return, no-untyped-call]

        trace = record(workload(Custom))
        made = made_by(trace, trace.steps[1], line_with("# in backward", Fill.backward), "backward")
        assert made[16 * 8 * FLOAT_BYTES] == 2

    def test_what_is_computed_again_has_the_line_that_computes_it(self) -> None:
        class Again(Wide):
            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

        trace = record(workload(Again))
        made = made_by(trace, trace.steps[1], line_with("# planted", Wide.forward), "backward")
        assert made[16 * 64 * 16 * FLOAT_BYTES] >= 1

    def test_a_node_that_no_seen_operation_made_is_given_to_none(
        self, record_one: Callable[..., tuple[Trace, Step]]
    ) -> None:
        """A view whose base was written gets a node anew when it is next used; that line must not be taken for it."""

        class Writes(Wide):
            def forward(self, x: Tensor) -> Tensor:
                base = self.up(x).clone()
                view = base[:, :8]
                base.mul_(2)
                return view.sin()  # bystander

        model = Writes()
        trace, step = record_one(model, lambda: model(torch.ones(16, 8)).sum())
        bystander = line_with("# bystander", Writes.forward)
        assert made_by(trace, step, bystander, "forward")[16 * 8 * FLOAT_BYTES] == 1
        assert 16 * 64 * FLOAT_BYTES not in made_by(trace, step, bystander, "backward")

    def test_outside_of_any_node_the_line_is_that_of_the_call(
        self, record_one: Callable[..., tuple[Trace, Step]]
    ) -> None:
        """The gradient of the loss itself, which backward begins with, in a loop of the user's own."""
        model = Wide()
        trace, step = record_one(model, lambda: model(torch.ones(16, 8)).sum())
        (first,) = [s for s in step.storages if trace.names[step.ops[s.birth].name] == "aten.ones_like.default"]
        assert trace.lines[first.line].endswith(" step")


class TestSameLinesElsewhere:
    MODEL = """\
import torch

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).sin()
"""

    def test_two_clones_write_the_same_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written = []
        for name in ("one", "another"):
            clone = tmp_path / name
            clone.mkdir()
            (clone / "model.py").write_text(self.MODEL)
            monkeypatch.chdir(clone)
            model = runpy.run_path(str(clone / "model.py"))["Model"]
            trace = record_fake(
                Workload(
                    model=lambda model=model: model(8, 8),  # type: ignore[misc]
                    batch=lambda: torch.ones(4, 8),
                    loss=lambda model, batch: model(batch).sum(),
                    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                )
            )
            assert "model.py:5 forward" in trace.lines
            save_trace(trace, clone / "a.mwtrace")
            written.append((clone / "a.mwtrace").read_bytes())
        assert written[0] == written[1]


def test_recording_changes_no_bit() -> None:
    """Of the losses and weights of three steps."""
    results = []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        model = Wide()
        if is_recorded:
            record(workload(lambda: model), num_steps=3)  # noqa: B023
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(16, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(plain, recorded) for plain, recorded in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_a_library_model_is_named_below_its_package() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    trace = record_fake(
        Workload(
            model=lambda: GPT2LMHeadModel(config),
            batch=lambda: torch.ones(2, 16, dtype=torch.long),
            loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
    )
    models = [line for line in trace.lines if line.startswith("transformers/models/gpt2/modeling_gpt2.py:")]
    assert models
    assert all(not line.startswith(("torch/", "/")) or Path(__file__).name in line for line in trace.lines)
