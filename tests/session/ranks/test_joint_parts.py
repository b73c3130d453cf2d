"""Memory that runs out on one of two ranks: both do that step again, to the bits of a run in which none failed."""

from typing import Any

import pytest
from rank_runs import found_by_ranks

pytestmark = [pytest.mark.slow(seconds=20), pytest.mark.timeout(300)]

SCRIPT = """
import hashlib, tempfile
import memwall
from memwall.session.ranks import joint_parts
from memwall.errors import ApplyError, MemwallError
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

DISK = tempfile.mkdtemp()

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
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 1)
        self.place, self.num_left, self.asked = "", 0, "9.00 MiB"

    def passes(self, place):
        "Fails, with more held than plans foresee: by chance a process holds 20 MiB less, which is all of these plans."
        if place == self.place and self.num_left:
            self.num_left -= 1
            ballast = torch.ones(10, 1024, 1024)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.asked}. GPU 0 has no more")

    def forward(self, values):
        for number, block in enumerate(self.blocks):
            if number == 2 and values.requires_grad:
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

def trained(place="", who=(), times=1, num_parts=1, asked="9.00 MiB", at=2, bare=False, over_ranks=False,
            accumulates=False, last=384, fsdp2=False, uneven=0):
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
        session = memwall.fit(inner, optimizer, budget="1TiB", disk=DISK)
    message = ""
    try:
        for step in range(1, 4):
            optimizer.zero_grad()
            num_here = num_parts + uneven * rank
            for part in range(num_here):
                batch = torch.randn(last if step == 3 else 384, 64)
                if step == at and rank in who and part == num_here - 1:
                    inner.place, inner.num_left = place, times
                def loss_of(rows):
                    if inner.place == "a mistake":
                        raise ApplyError("this is no lack of memory")
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

def all_of(cases, **divided):
    "What each case comes to; the few that no other case includes, or all."
    def those(run, few, more):
        return {case: run(**how, **divided) for case, how in (few if cases == "few" else few | more).items()}

    waits = dict(num_parts=2, accumulates=True)
    plain = those(trained, {"1": dict(bare=True), "no_sync": dict(bare=True, **waits)},
                  {"2": dict(bare=True, num_parts=2)})
    again = those(trained, {
        "forward, repeated": dict(place="forward", who=(1,), times=2, asked="64.00 KiB"),
        "backward, both": dict(place="backward", who=(0, 1), over_ranks=True),
    }, {
        "undisturbed": {},
        "before the model": dict(place="before the model", who=(1,)),
        "forward": dict(place="forward", who=(1,)), "forward, both": dict(place="forward", who=(0, 1)),
        "backward": dict(place="backward", who=(0,)),
    })
    parts = those(trained, {"no_sync": dict(place="backward", who=(0,), **waits)},
                  {"2": dict(place="backward", who=(1,), num_parts=2)})
    # Under FSDP2 each part gathers parameters, so that torch itself has no such loops.
    uneven = [] if divided["fsdp2"] else [trained(bare=bare, accumulates=True, uneven=1) for bare in (True, False)]
    joint_parts._NUM_CAREFUL, before = 1, joint_parts._NUM_CAREFUL
    few = {"larger fails": dict(place="forward", who=(1,), at=3, last=385),
           "as large fails": dict(place="forward", who=(0, 1), at=3)}
    sure = those(counted, few, {"smaller": dict(last=100), "as large": {}, "larger": dict(last=385)})
    plain_of = {rows: trained(bare=True, last=rows, **divided)[0]
                for rows in ((385,) if cases == "few" else (385, 100))}
    joint_parts._NUM_CAREFUL = before
    ends = those(trained, {"another error": dict(place="a mistake", who=(1,))},
                 {"no plan": dict(place="forward", who=(1,), asked="900.00 GiB")})
    most, memwall.session.recovery.MAX_ATTEMPTS = memwall.session.recovery.MAX_ATTEMPTS, 1
    ends |= those(trained, {"too often": dict(place="backward", who=(1,), times=9, asked="64.00 KiB")}, {})
    memwall.session.recovery.MAX_ATTEMPTS = most
    return dict(plain=plain, sure=sure, plain_of=plain_of, again=again, parts=parts, uneven=uneven, ends=ends)

def replaced():
    "What comes of a script that trains another model from its third step on, and lets go of the first one."
    def made():
        inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        model = DistributedDataParallel(inner)
        return inner, model, torch.optim.SGD(model.parameters(), lr=1e-3)

    inner, model, optimizer = made()
    session, are_equal = memwall.fit(inner, optimizer, budget="1TiB", disk=DISK), []
    for step in range(1, 5):
        if step == 3:
            inner, model, optimizer = made()
            session.train_also(inner)
            session.add_optimizer(optimizer)
        optimizer.zero_grad()
        session.compute_gradients(torch.randn(32, 64), lambda rows: model(rows).square().mean())
        gradient = next(model.parameters()).grad
        of_all = [torch.empty_like(gradient) for _ in range(2)]
        distributed.all_gather(of_all, gradient)
        are_equal.append(torch.equal(*of_all))
        optimizer.step()
    session.close()
    return are_equal

found(ddp=all_of(os.environ["CASES"], fsdp2=False), fsdp2=all_of(os.environ["CASES"], fsdp2=True), replaced=replaced())
"""


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.exhaustive)])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by_ranks(2, SCRIPT, tmp_path_factory.mktemp("ranks"), CASES=request.param)


@pytest.fixture(params=["ddp", "fsdp2"])
def found(request: pytest.FixtureRequest, both: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank[request.param] for rank in both]


def test_a_step_is_done_again_to_the_same_bits(found: list[dict[str, Any]]) -> None:
    """GIVEN dropout, batch statistics and buckets WHEN one rank fails, or both THEN no bit differs from plain torch."""
    for rank in found:
        expected = rank["plain"]["1"][0]
        num_recoveries = {"forward, repeated": 2, "undisturbed": 0}
        assert rank["again"] == {case: [expected, num_recoveries.get(case, 1), ""] for case in rank["again"]}
        assert len(rank["again"]) >= 2


def test_parts_of_a_step_are_done_again_with_it(found: list[dict[str, Any]]) -> None:
    """GIVEN a loop that accumulates, with a reduction each time or once WHEN its second part fails THEN the same."""
    for rank in found:
        assert rank["parts"] == {kind: [rank["plain"][kind][0], 1, ""] for kind in rank["plain"] if kind != "1"}


def test_ranks_that_accumulate_unequally_often_do_not_wait_for_each_other(found: list[dict[str, Any]]) -> None:
    """GIVEN a rank with two parts to the other's one, and one reduction WHEN they train THEN as in plain torch."""
    for rank in found:
        assert rank["uneven"][1:] == rank["uneven"][:1]


def test_steps_that_have_room_are_run_as_without_that(found: list[dict[str, Any]]) -> None:
    """GIVEN a plan that has shown what it needs WHEN no batch is larger THEN backward is not waited for
    AND a larger one may be done again, to the same bits.
    """
    for rank in found:
        of, sure = {int(rows): bits for rows, bits in rank["plain_of"].items()}, rank["sure"]
        bits, num_recoveries, message, _ = sure.pop("as large fails")
        expected = {  # one part may be done again: that of the second step; the first one is recorded
            "as large": [rank["plain"]["1"][0], 0, "", 1],
            "smaller": [of.get(100), 0, "", 1],
            "larger": [of[385], 0, "", 2],
            "larger fails": [of[385], 1, "", 2],
        }
        assert sure == {case: expected[case] for case in sure}
        assert "larger fails" in sure
        assert (bits, num_recoveries) == ("", 0)
        assert "the others wait for its part of this step" in message


def test_all_end_where_it_cannot_be_done_again(found: list[dict[str, Any]]) -> None:
    """GIVEN a step that fails again and again, or whatever the plan THEN both ranks end, each with what is so."""
    reasons = {"too often": "this run was recovered 1 times before", "no plan": "no plan needs less than that"}
    cases = reasons.keys() & found[0]["ends"].keys()
    assert "too often" in cases
    for case in cases:
        (_, num_others, other), (_, num_own, own) = (rank["ends"][case] for rank in found)
        assert num_others == num_own == (case == "too often")
        assert own.startswith("OutOfMemoryError: out of memory in the ")
        assert reasons[case] in own
        assert other.startswith("RankError: ")
        assert reasons[case] in other
        assert "rank 1 of 2" in other


def test_a_model_that_takes_the_place_of_another_is_reduced_as_it_was(both: list[dict[str, Any]]) -> None:
    assert [rank["replaced"] for rank in both] == [[True] * 4] * 2


def test_another_failure_ends_all(found: list[dict[str, Any]]) -> None:
    """GIVEN a mistake in what one rank does WHEN it raises THEN the other one says so, and does not wait."""
    other, own = (rank["ends"]["another error"][2] for rank in found)
    assert own == "ApplyError: this is no lack of memory"
    assert other.startswith(
        "RankError: rank 1 of 2 ended its run in this step, and no rank can train on alone: this is"
    )
