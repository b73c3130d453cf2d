"""What a GiB costs by each way that a plan weighed."""

import pytest
from msgspec.structs import replace

from memwall.planning.explain import levers_of
from memwall.planning.forecast import Lever
from memwall.planning.menu import Menu
from memwall.planning.solver.instance import Choice, Option
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.kernels import FusedKernels
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.predict.call_rules import BlockCalls, Treatment

GIB = 1 << 30
OPTIONS = {
    "keep": (0.0, 0),
    "full": (4.0, 2 * GIB),
    "select-1": (3.0, GIB),
    "select-2": (1.0, GIB),
    "offload": (0.1, GIB),
}


def a_menu(path: str, names: tuple[str, ...] = tuple(OPTIONS)) -> Menu:
    return Menu(
        block=BlockCalls(path=path, module=0, calls=(), saved=()),
        options=tuple(Option(name=name, extra_seconds=OPTIONS[name][0], moved_bytes=0) for name in names),
        treatments=(None, *(Treatment(recompute=True) for _ in names[1:])),
        op_names=(),
        freed_bytes=tuple(OPTIONS[name][1] for name in names),
    )


def chosen(*options: int) -> Choice:
    return Choice(options, 0.0, 0.0)


def test_each_way_is_there_with_what_it_would_do_in_all_blocks_and_where_it_is_used() -> None:
    found = levers_of([a_menu("h.0"), a_menu("h.1"), a_menu("h.2", ("keep", "full"))], chosen(4, 1, 0), ())
    assert found == (
        Lever(
            name="offload saved tensors",
            freed_bytes=2 * GIB,
            cost_seconds=0.2,
            num_blocks=2,
            num_blocks_used=1,
        ),
        # The cheaper of the two points, as none is used.
        Lever(name="recompute, keep some", freed_bytes=2 * GIB, cost_seconds=2.0, num_blocks=2, num_blocks_used=0),
        Lever(name="recompute", freed_bytes=6 * GIB, cost_seconds=12.0, num_blocks=3, num_blocks_used=1),
    )
    assert [lever.seconds_per_gib for lever in found] == pytest.approx([0.1, 1.0, 2.0])


def test_of_several_selective_points_the_one_that_is_used_counts() -> None:
    (selective,) = (lever for lever in levers_of([a_menu("h.0")], chosen(2), ()) if "some" in lever.name)
    assert (selective.cost_seconds, selective.num_blocks_used) == (3.0, 1)


def test_an_option_that_frees_nothing_is_none() -> None:
    useless = replace(a_menu("h.0", ("keep", "full")), freed_bytes=(0, -16))
    assert levers_of([useless], chosen(0), ()) == ()


def test_a_lever_names_the_tier_that_state_goes_to() -> None:
    state = OptimizerPlacement(
        tier="host", resident_bytes=0, bucket_bytes=1, min_bytes=1, saved_bytes=GIB, cost_seconds=2.0
    )
    assert [lever.name for lever in levers_of((), chosen(), (state,))] == ["optimizer state to host"]


def test_of_the_other_actions_those_that_free_bytes_for_time_are_among_them() -> None:
    kernels = FusedKernels(modules=("norm",), saved_bytes=2 * GIB, cost_seconds=-1.0)
    state = OptimizerPlacement(
        tier="disk", resident_bytes=0, bucket_bytes=1, min_bytes=1, saved_bytes=GIB, cost_seconds=2.0
    )
    silent = (Accumulate(micro_batch=1, num_micro_batches=2), AllocatorReuse(policy="tensor-heap", cost_seconds=0.1))
    found = levers_of([a_menu("h.0", ("keep", "full"))], chosen(1), (kernels, state, *silent))
    assert [lever.name for lever in found] == ["fused kernels", "recompute", "optimizer state to disk"]
    assert found[0].seconds_per_gib == -0.5
