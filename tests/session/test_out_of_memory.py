"""Memory that runs out: a step that was handed over is done again to the same bits; what cannot be says so, and why."""

import hashlib
import logging
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from failing_models import Block, Bomb
from plans import plan_of
from torch import Tensor, nn
from warm_python import warm_python

import memwall
from memwall.errors import OutOfMemoryError
from memwall.planning.techniques.accumulate import Accumulate
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.session.next_budget import MAX_ATTEMPTS
from memwall.session.session import Session

pytestmark = pytest.mark.slow

MIB = 1 << 20
NUM_STEPS = 3
SAMPLES = 512


class Model(nn.Module):
    """Three blocks, with bombs where a step holds nearly what it holds at most, which is what plans after it may need.

    In forward that is behind the last block; in backward before it, when its gradients are there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 1)
        self.bomb = Bomb()

    def forward(self, values: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 2 and values.requires_grad:
                values.register_hook(lambda _: self.bomb.passes("backward"))
            values = block(values)
        self.bomb.passes("forward" if torch.is_grad_enabled() else "evaluation")
        return self.head(values)


def digest(model: nn.Module) -> str:
    """SHA-256 over parameters and buffers."""
    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def made() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    session: Session | None = None,
    *,
    arm: Callable[[int, int], None] = lambda step, part: None,
    num_parts: int = 1,
) -> str:
    """Trains for some steps of so many parts each; returns the digest of what came out."""
    torch.manual_seed(1)
    for step in range(NUM_STEPS):
        for part in range(num_parts):
            batch = torch.randn(SAMPLES, 64)
            arm(step, part)
            if session is None:
                model(batch).square().mean().backward()
            else:
                session.compute_gradients(batch, lambda rows: model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """What a run without memwall and without failures learns, by parts in a step."""
    return {num_parts: train(*made(), num_parts=num_parts) for num_parts in (1, 2)}


class TestRecovery:
    @pytest.mark.parametrize("place", ["forward", "backward"])
    def test_a_step_is_done_again_to_the_same_bits(
        self, place: str, expected: dict[int, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """GIVEN dropout and batch statistics WHEN a step fails THEN one new plan, one line, and no bit is different."""
        model, optimizer = made()
        with (
            caplog.at_level(logging.WARNING, logger="memwall.session.recovery"),
            memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
        ):
            found = train(model, optimizer, session, arm=lambda step, _: model.bomb.arm(place) if step == 1 else None)
        assert found == expected[1]
        assert session.measured.oom_recoveries == 1
        assert session.measured.num_steps == NUM_STEPS
        assert session.plan is not None
        assert session.plan.actions != ()
        (line,) = [record.getMessage() for record in caplog.records if record.name == "memwall.session.recovery"]
        assert line.startswith(f"out of memory in the {place} of step 2: 4.0 MiB asked for, ")
        assert "; attempt 1 of 3, under a plan for " in line

    def test_a_part_of_a_step_brings_back_the_parts_before_it(self, expected: dict[int, str], tmp_path: Path) -> None:
        """GIVEN a loop that accumulates WHEN its second part fails in backward THEN both are done again."""
        model, optimizer = made()
        with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
            found = train(
                model,
                optimizer,
                session,
                arm=lambda step, part: model.bomb.arm("backward") if (step, part) == (1, 1) else None,
                num_parts=2,
            )
        assert found == expected[2]
        assert session.measured.oom_recoveries == 1

    @pytest.mark.parametrize(("asked", "is_divided"), [("4.00 MiB", False), ("44.00 MiB", True)])
    def test_the_batch_is_divided_only_where_nothing_else_helps(
        self, asked: str, is_divided: bool, tmp_path: Path
    ) -> None:
        """GIVEN a model whose batch may be divided WHEN a step fails THEN it is done again, to the same bits;
        where only parts fit, they are the whole batch, and so is the gradient."""
        found = []
        for fails in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)) for _ in "123"))
            bomb = Bomb()
            bomb.asked = asked
            model[2].register_forward_pre_hook(lambda *_, bomb=bomb: bomb.passes("forward"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            batch = torch.randn(SAMPLES, 64)
            with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
                for step in range(2):
                    optimizer.zero_grad()
                    if fails and step == 1:
                        bomb.arm("forward")
                    loss = session.compute_gradients(batch, lambda rows, model=model: model(rows).square().mean())
                    optimizer.step()
                found.append([loss, *(p.grad for p in model.parameters())])
        assert session.plan is not None
        parts = [action for action in session.plan.actions if isinstance(action, Accumulate)]
        assert [each.micro_batch * each.num_micro_batches for each in parts] == [SAMPLES] * is_divided
        if is_divided:
            torch.testing.assert_close(found[1], found[0])
        else:
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    def test_attempts_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """GIVEN a step that fails whatever the plan WHEN it was recovered as often as may be THEN the run ends."""
        assert MAX_ATTEMPTS == 3
        monkeypatch.setattr("memwall.session.recovery.MAX_ATTEMPTS", 1)
        model, optimizer = made()
        model.bomb.asked = "64.00 KiB"
        with (
            pytest.raises(OutOfMemoryError, match="this run was recovered 1 times before;"),
            memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
        ):
            train(
                model,
                optimizer,
                session,
                arm=lambda step, _: model.bomb.arm("backward", times=9) if step == 1 else None,
            )
        assert session.measured.oom_recoveries == 1
        assert model.bomb.num_left == 9 - 2

    def test_a_failure_that_no_plan_makes_up_for_ends_the_run(self, tmp_path: Path) -> None:
        """GIVEN a request larger than all activations WHEN it fails THEN the error says that no plan needs less."""
        model, optimizer = made()
        model.bomb.asked = "900.00 GiB"
        with (
            pytest.raises(OutOfMemoryError, match="no plan needs less than that; use a smaller batch") as caught,
            memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
        ):
            train(model, optimizer, session, arm=lambda step, _: model.bomb.arm("forward") if step == 1 else None)
        assert caught.value.asked_bytes == 900 << 30
        assert caught.value.next_budget_bytes == 0
        assert session.measured.oom_recoveries == 0

    def test_another_failure_is_nobody_elses_business(self) -> None:
        """GIVEN a step that raises something else WHEN it was handed over THEN the error passes as it is."""
        model, optimizer = made()
        with pytest.raises(ZeroDivisionError), memwall.fit(model, optimizer, plan=plan_of(model)) as session:
            session.compute_gradients(torch.ones(4, 64), lambda _: 1 / 0)

    @pytest.mark.usefixtures("one_thread")
    @pytest.mark.skipif(bool(heap_unavailable_reason()), reason=heap_unavailable_reason())
    def test_a_limit_of_the_system_below_the_budget_is_found_and_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """GIVEN a process whose data are limited after its first step WHEN malloc fails THEN it trains on."""
        script = textwrap.dedent("""
            import logging, resource, sys, torch, memwall
            from memwall.machine.meter import process_bytes
            logging.basicConfig(level=logging.WARNING)
            torch.manual_seed(0)
            layers = torch.nn
            blocks = [layers.Sequential(layers.Linear(64, 2048), layers.GELU(), layers.Linear(2048, 64),
                      layers.BatchNorm1d(64)) for _ in range(4)]
            model = torch.nn.Sequential(*blocks)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            batch = torch.randn(1024, 64)
            if sys.argv[1] == "plain":
                session = None
            else:
                session = memwall.fit(model, optimizer, budget="1TiB", disk=sys.argv[1])
            for step in range(3):
                if session is None:
                    model(batch).square().mean().backward()
                else:
                    session.compute_gradients(batch, lambda rows: model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if session is not None and step == 0:
                    session.end_step()
                    assert session.plan.actions == ()
                    status = open("/proc/self/status").read()
                    limit = (int(status.split("VmData:")[1].split()[0]) << 10) + (50 << 20)
                    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            if session is not None:
                session.close()
                print(session.measured.oom_recoveries)
            print(sum(p.double().sum().item() for p in model.parameters()).hex())
        """)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process
        run = warm_python().run("-c", script, tmp_path)
        assert run.returncode == 0, run.stderr
        monkeypatch.setattr(sys, "argv", ["script", "plain"])
        exec(script, {})
        recoveries, found = run.stdout.split()
        assert int(recoveries) in (1, 2, 3)
        assert found == capsys.readouterr().out.strip()
        assert "DefaultCPUAllocator" not in run.stderr
        assert run.stderr.count("out of memory in the ") == int(recoveries)


class TestFirstStep:
    @pytest.mark.parametrize("place", ["forward", "backward"])
    def test_says_that_its_plan_is_the_safest_already(self, place: str, tmp_path: Path) -> None:
        """GIVEN a recorded first step WHEN it fails THEN the run ends with one error, and nothing is left behind."""
        model, optimizer = made()
        model.bomb.arm(place)
        with (
            pytest.raises(
                OutOfMemoryError,
                match=rf"^out of memory in the {place} of step 1: 4\.0 MiB could not be had while the process held "
                r"[\d.]+ \wiB of a budget of 1\.00 TiB; the first step runs under the safest plan that there is "
                r"already; use a smaller batch and accumulate, or give the process more memory$",
            ),
            memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
        ):
            train(model, optimizer, session)
        assert session.state == "closed"
        assert list(tmp_path.iterdir()) == []
        assert torch._C._len_torch_dispatch_stack() == 0


def run_to(phase: str, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """One step by hand, which fails in one phase."""
    if phase == "optimizer step":
        optimizer.register_step_pre_hook(lambda *_: model.bomb.passes(phase))
    model.bomb.arm(phase, times=2 if phase == "evaluation" else 1)  # which is called again once
    batch = torch.randn(SAMPLES, 64)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if phase == "between steps":
        model.bomb.passes(phase)
    with torch.no_grad():
        model(batch)
    model.state_dict()
    model.bomb.passes("saving")


BY_HAND = "the loop computes the gradients itself, so that memwall cannot do that again"
UNTOUCHED = "the training batch and its plan stay as they are"


class TestPhases:
    @pytest.mark.parametrize(
        ("phase", "where", "why"),
        [
            ("forward", "in the forward of step 1", "the run follows a plan that was given"),
            ("backward", "in the backward of step 1", "the run follows a plan that was given"),
            ("optimizer step", "in the optimizer step of step 1", "parameters had begun to change"),
            ("evaluation", "in evaluation, after step 1", f"{UNTOUCHED}; evaluate smaller batches"),
            ("saving", "in saving, after step 1", f"{UNTOUCHED}; save straight to a file"),
            ("between steps", "outside any training step, after step 1", f"{UNTOUCHED}; look for what allocates"),
        ],
    )
    def test_each_is_named_and_its_batch_stays(self, phase: str, where: str, why: str) -> None:
        """GIVEN a loop of its own WHEN a phase fails THEN the typed error names it, and the plan stays as it is."""
        model, optimizer = made()
        plan = plan_of(model)
        with pytest.raises(OutOfMemoryError) as caught, memwall.fit(model, optimizer, plan=plan) as session:
            run_to(phase, model, optimizer)
        text = str(caught.value)
        assert text.startswith(f"out of memory {where}: 4.0 MiB could not be had while the process held ")
        assert why in text
        assert caught.value.phase == phase
        assert caught.value.exit_status == 3
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert session.plan == plan
        assert session.measured.oom_recoveries == 0
        assert caught.value.next_budget_bytes == 0
        trains = phase in ("forward", "backward", "optimizer step")
        assert ("use a smaller batch and accumulate" in text) == trains

    def test_a_loop_that_catches_the_error_meets_it_again(self) -> None:
        """GIVEN a loop that leaves out what fails WHEN it goes on THEN the next forward raises the same error."""
        model, optimizer = made()
        with memwall.fit(model, optimizer, plan=plan_of(model)) as session:
            model.bomb.arm("forward")
            with pytest.raises(OutOfMemoryError):
                session.compute_gradients(torch.randn(8, 64), lambda rows: model(rows).sum())
            with pytest.raises(OutOfMemoryError):
                model(torch.randn(8, 64))
