"""The calls that a step makes to an allocator, and what is foreseen of malloc, which answers those of a plain run."""

from collections.abc import Sequence

from memwall.machine.tiers import Machine
from memwall.predict.heap_calls import ALLOCATE, FREE, MOVE, STEP, events_of, repeated
from memwall.predict.process import ProcessModel
from memwall.trace.records import Category, Op, Phase, Step, Storage, Trace

MIB = 1 << 20


def storage(nbytes: int, birth: int, death: int, *, category: Category = "activation", device: str = "cpu") -> Storage:
    return Storage(
        nbytes=nbytes,
        device=device,
        category=category,
        birth=birth,
        dropped=death,
        death=death,
        module=0,
        phase="forward",
        batched=False,
    )


def step(storages: list[Storage], phases: list[Phase]) -> Step:
    ops = tuple(
        Op(name=0, module=0, phase=phase, seconds=0.0, flops=0, inputs=(), outputs=(), writes=()) for phase in phases
    )
    return Step(
        kind="steady",
        ops=ops,
        storages=tuple(storages),
        saved=(),
        calls=(),
        marks=(),
        wall_seconds=0.0,
        process_peak_bytes=0,
    )


def triples(events: Sequence[int]) -> list[tuple[int, int, int]]:
    flat = list(events)
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def test_at_an_operation_frees_come_before_its_own_blocks() -> None:
    events = events_of(step([storage(10, 0, 1), storage(20, 1, 2)], ["forward", "forward"]))
    # The second storage dies with the last operation, so it outlives the step.
    assert triples(events.events) == [(ALLOCATE, 0, 10), (FREE, 0, 0), (ALLOCATE, 1, 20)]
    assert events.after == {1: 20}


def test_only_memory_of_the_process_is_replayed() -> None:
    events = events_of(step([storage(10, 0, 1, device="cuda:0"), storage(0, 0, 1)], ["forward"]))
    assert triples(events.events) == []


def test_what_outlives_a_step_takes_the_place_of_what_the_next_one_expects() -> None:
    gradients = [storage(700, -1, 1, category="gradient"), storage(700, 1, 3, category="gradient")]
    steady = events_of(
        step([storage(5000, -1, 3, category="parameter"), *gradients], ["forward", "backward", "optimizer"]),
    )
    assert triples(repeated(steady, 2)) == [
        (ALLOCATE, 0, 5000),
        (ALLOCATE, 1, 700),
        (STEP, 0, 0),
        (FREE, 1, 0),
        (ALLOCATE, 2, 700),
        (STEP, 0, 0),
        (MOVE, 1, 2),
        (FREE, 1, 0),
        (ALLOCATE, 2, 700),
    ]


def test_a_gradient_that_lives_until_it_is_zeroed_does_not_pile_up() -> None:
    events = events_of(
        step([storage(MIB, -1, 1, category="gradient"), storage(MIB, 1, 2, category="gradient")], ["backward"] * 2)
    )
    live: dict[int, int] = {}
    for kind, slot, nbytes in triples(repeated(events, 4)):
        if kind == MOVE:
            live[slot] = live.pop(nbytes)
        elif kind == FREE:
            del live[slot]
        elif kind != STEP:
            live[slot] = nbytes
        assert sum(live.values()) < 1.5 * MIB
    assert sum(live.values()) == MIB


def test_malloc_is_foreseen_to_keep_a_third_of_what_comes_and_goes() -> None:
    """GIVEN weights of 90 MiB and 30 MiB that pass WHEN nothing is done THEN 10 MiB more are held than tensors have."""
    weights = storage(90 * MIB, -1, 3, category="parameter")
    short = step([weights, storage(30 * MIB, 0, 1), storage(20 * MIB, 1, 2)], ["forward", "backward"])
    trace = Trace(
        schema="memwall.trace/2",
        source="recorded",
        device="cpu",
        torch_version="2.13.0",
        num_threads=1,
        model_fingerprint="",
        optimizer="",
        micro_batch=1,
        gradients_persist=False,
        num_micro_batches=1,
        autocast="none",
        is_parked=False,
        base_bytes=MIB,
        workspace_bytes=0,
        machine=Machine(),
        names=(),
        modules=(),
        steps=(short,),
        input_shape=(),
        input_dtype="",
    )
    process = ProcessModel(trace)
    assert process.bare(short).process_bytes == 121 * MIB
    assert process.untreated(short).process_bytes == 121 * MIB + int(0.33 * 30 * MIB)
