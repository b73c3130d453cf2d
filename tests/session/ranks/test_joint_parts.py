"""Memory that runs out on one of two ranks: both do that step again, to the bits of a run in which none failed."""

from typing import Any

import pytest
from rank_runs import found_by_ranks

pytestmark = pytest.mark.slow(seconds=20)

SCRIPT = """
import hashlib, tempfile
import memwall
from memwall.session.ranks import joint_parts
from memwall.errors import ApplyError, MemwallError
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

class Block(nn.Module):
    "Random numbers, statistics that a forward changes, and more activations than weights."
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 64))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, values):
        return values + self.norm(self.inner(values))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(64, 1)
        self.place, self.num_left, self.asked = "", 0, "4.00 MiB"

    def passes(self, place):
        "Fails where the step holds nearly what it holds at most, which is what plans after it may need."
        if place == self.place and self.num_left:
            self.num_left -= 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.asked}. GPU 0 has no more")

    def forward(self, values):
        for number, block in enumerate(self.blocks):
            if number == 4 and values.requires_grad:
                values.register_hook(lambda _: self.passes("backward"))
            values = block(values)
        self.passes("forward")
        return self.head(values)

def digest(model):
    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())):
        tensor = getattr(tensor, "_local_tensor", tensor)
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

def trained(place="", who=(), times=1, num_parts=1, asked="4.00 MiB", at=2, bare=False, over_ranks=False,
            accumulates=False, last=512, fsdp2=False, uneven=0):
    "What three steps come to, by how many recoveries; the ranks in `who` run out of memory in the second one."
    torch.manual_seed(0)
    inner = Model()
    inner.asked = asked
    for unit in (*inner.blocks, inner) if fsdp2 else ():
        fully_shard(unit)
    model = inner if fsdp2 else DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(10 + rank)
    session = None
    if not bare:
        session = memwall.fit(inner, optimizer, budget="1TiB", disk=tempfile.mkdtemp())
    message = ""
    try:
        for step in range(1, 4):
            optimizer.zero_grad()
            num_here = num_parts + uneven * rank
            for part in range(num_here):
                batch = torch.randn(last if step == 3 else 512, 64)
                if step == at and rank in who and part == num_here - 1:
                    inner.place, inner.num_left = place, times
                def loss_of(rows):
                    if inner.place == "a mistake":
                        raise ApplyError("this is no lack of memory")
                    held = torch.ones(512, 16, 1024) if inner.place == "before the model" and inner.num_left else None
                    inner.passes("before the model")
                    return model(rows).square().mean()
                waits = accumulates and part < num_here - 1
                if fsdp2:
                    model.set_requires_gradient_sync(not waits)
                else:
                    model.require_backward_grad_sync = not waits
                if session is None:
                    loss_of(batch).backward()
                else:
                    session.compute_gradients(batch, loss_of, over_ranks=over_ranks)
            optimizer.step()
    except MemwallError as error:
        message = f"{type(error).__name__}: {error}"
    if session is not None:
        session.close(completed=not message)
    return ["" if message else digest(model), 0 if session is None else session.measured.oom_recoveries, message]

def counted(**how):
    "Also how many parts could be done again, each of which looks once whether another rank has failed."
    end, calls = joint_parts.JointParts._note, []
    joint_parts.JointParts._note = lambda self, shapes: (calls.append(1), end(self, shapes))
    try:
        return [*trained(**how), len(calls)]
    finally:
        joint_parts.JointParts._note = end

def all_of(divided):
    plain = {"1": trained(bare=True, **divided), "2": trained(bare=True, num_parts=2, **divided),
             "no_sync": trained(bare=True, num_parts=2, accumulates=True, **divided)}
    again = {
        f"{place}, {who}": trained(place, who, **divided)
        for place, who in (("before the model", (1,)), ("forward", (1,)), ("forward", (0, 1)), ("backward", (0,)),
                           ("backward", (0, 1)))
    }
    again["repeated"] = trained("forward", (1,), times=2, asked="64.00 KiB", **divided)
    again["over all ranks"] = trained("forward", (0,), over_ranks=True, **divided)
    parts = {"2": trained("backward", (1,), num_parts=2, **divided),
             "no_sync": trained("backward", (0,), num_parts=2, accumulates=True, **divided)}
    undisturbed = trained(**divided)
    # Under FSDP2 each part gathers parameters, so that torch itself has no such loops.
    uneven = [] if divided["fsdp2"] else [trained(bare=bare, accumulates=True, uneven=1) for bare in (True, False)]
    joint_parts._NUM_CAREFUL, before = 1, joint_parts._NUM_CAREFUL
    sure = {"as large": counted(**divided), "larger": counted(last=513, **divided),
            "smaller": counted(last=100, **divided),
            "larger fails": counted(place="forward", who=(1,), at=3, last=513, **divided),
            "as large fails": counted(place="forward", who=(0, 1), at=3, **divided)}
    plain_of = {rows: trained(bare=True, last=rows, **divided)[0] for rows in (512, 513, 100)}
    joint_parts._NUM_CAREFUL = before
    ends = {"another error": trained("a mistake", (1,), **divided),
            "no plan": trained("forward", (1,), asked="900.00 GiB", **divided)}
    most, memwall.session.recovery.MAX_ATTEMPTS = memwall.session.recovery.MAX_ATTEMPTS, 1
    ends["too often"] = trained("backward", (1,), times=9, asked="64.00 KiB", **divided)
    memwall.session.recovery.MAX_ATTEMPTS = most
    return {"plain": plain, "undisturbed": undisturbed, "sure": sure, "plain_of": plain_of, "again": again,
            "parts": parts, "uneven": uneven, "ends": ends}

found(**all_of({"fsdp2": os.environ["DIVIDED"] == "fsdp2"}))
"""


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by_ranks(2, SCRIPT, tmp_path_factory.mktemp("ranks"), DIVIDED=request.param)


def test_a_step_is_done_again_to_the_same_bits(found: list[dict[str, Any]]) -> None:
    """GIVEN dropout, batch statistics and buckets WHEN one rank fails, or both THEN no bit differs from plain torch."""
    for rank in found:
        expected = rank["plain"]["1"][0]
        assert rank["undisturbed"] == [expected, 0, ""]
        recovered = {case: values[1] for case, values in rank["again"].items()}
        assert recovered == {case: 2 if case == "repeated" else 1 for case in recovered}
        assert {case: values[0] == expected for case, values in rank["again"].items()} == dict.fromkeys(recovered, True)


def test_parts_of_a_step_are_done_again_with_it(found: list[dict[str, Any]]) -> None:
    """GIVEN a loop that accumulates, with a reduction each time or once WHEN its second part fails THEN the same."""
    for rank in found:
        assert rank["parts"] == {kind: [rank["plain"][kind][0], 1, ""] for kind in ("2", "no_sync")}


def test_ranks_that_accumulate_unequally_often_do_not_wait_for_each_other(found: list[dict[str, Any]]) -> None:
    """GIVEN a rank with two parts to the other's one, and one reduction WHEN they train THEN as in plain torch."""
    for rank in found:
        assert rank["uneven"][1:] == rank["uneven"][:1]


def test_steps_that_have_room_are_run_as_without_that(found: list[dict[str, Any]]) -> None:
    """GIVEN a plan that has shown what it needs WHEN no batch is larger THEN backward is not waited for
    AND a larger one may be done again, to the same bits.
    """
    for rank in found:
        of = {int(rows): bits for rows, bits in rank["plain_of"].items()}
        assert rank["sure"]["as large"] == [of[512], 0, "", 1]  # the second step; the first one is recorded
        assert rank["sure"]["smaller"] == [of[100], 0, "", 1]
        assert rank["sure"]["larger"] == [of[513], 0, "", 2]
        assert rank["sure"]["larger fails"] == [of[513], 1, "", 2]
        bits, num_recoveries, message, _ = rank["sure"]["as large fails"]
        assert (bits, num_recoveries) == ("", 0)
        assert "the others wait for its part of this step" in message


@pytest.mark.parametrize(
    ("case", "reason"),
    [("too often", "this run was recovered 1 times before"), ("no plan", "no plan needs less than that")],
)
def test_all_end_where_it_cannot_be_done_again(found: list[dict[str, Any]], case: str, reason: str) -> None:
    """GIVEN a step that fails again and again, or whatever the plan THEN both ranks end, each with what is so."""
    (_, num_others, other), (_, num_own, own) = (rank["ends"][case] for rank in found)
    assert num_others == num_own == (case == "too often")
    assert own.startswith("OutOfMemoryError: out of memory in the ")
    assert reason in own
    assert other.startswith("RankError: ")
    assert reason in other
    assert "rank 1 of 2" in other


def test_another_failure_ends_all(found: list[dict[str, Any]]) -> None:
    """GIVEN a mistake in what one rank does WHEN it raises THEN the other one says so, and does not wait."""
    other, own = (rank["ends"]["another error"][2] for rank in found)
    assert own == "ApplyError: this is no lack of memory"
    assert other.startswith(
        "RankError: rank 1 of 2 ended its run in this step, and no rank can train on alone: this is"
    )
