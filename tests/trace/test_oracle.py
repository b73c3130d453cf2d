"""The allocator's own count, on steps whose bytes are known by arithmetic."""

import oracle
import pytest
import torch
import zoo

MIB = 1 << 20


def _floats(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB // 4)


def test_peak_is_the_most_that_was_live_at_once():
    def step():
        first = _floats(3)
        second = _floats(4)
        del first
        third = _floats(2)
        del second, third

    count = oracle.count_allocations(step)
    assert count.peak_bytes == 7 * MIB
    assert [event.signed_bytes // MIB for event in count.events] == [3, 4, -3, 2, -4, -2]
    assert [event.live_bytes // MIB for event in count.events] == [3, 7, 4, 6, 2, 0]


def test_existing_storages_count_once_however_many_tensors_view_them():
    weight = _floats(5)
    assert oracle.profiler_peak_bytes(lambda: _floats(1), existing=[weight, weight[10:], weight.view(-1, 4)]) == 6 * MIB


def test_memory_left_by_a_warm_step_is_live_at_the_start_and_its_release_is_seen():
    held = {}

    def step():
        held.pop("gradient", None)
        held["gradient"] = _floats(4)

    count = oracle.count_allocations(step, warm_steps=1)
    assert count.start_bytes == 4 * MIB
    assert count.peak_bytes == 4 * MIB


def test_an_existing_storage_released_by_the_step_is_an_error():
    held = [_floats(2)]
    with pytest.raises(ValueError, match=r"released 1 of 1 existing storages \(2097152 bytes\)"):
        oracle.count_allocations(held.clear, existing=iter([held[0]]))


def test_temporaries_inside_an_operator_are_counted_and_named():
    images, kernels = torch.randn(4, 16, 64, 64), torch.randn(32, 16, 3, 3)
    count = oracle.count_allocations(lambda: torch.conv2d(images, kernels, padding=1))
    output_bytes = 4 * 32 * 64 * 64 * 4
    assert count.peak_bytes >= output_bytes
    assert "aten::conv2d" in count.events[0].operators
    assert sum(event.signed_bytes for event in count.events if event.signed_bytes > 0) > output_bytes


@pytest.mark.parametrize("name", ["gpt", "vit", "moe"])
def test_a_training_step_leaves_nothing_behind_once_gradients_are_dropped(name):
    case = zoo.MODELS[name]("tiny")
    parameters = zoo.trained_parameters(case.model)
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def step():
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    count = oracle.count_allocations(step, [*case.model.parameters(), *case.batch.values()])
    gradient_bytes = sum(parameter.nbytes for parameter in parameters)
    assert count.events[-1].live_bytes == count.start_bytes
    assert count.peak_bytes > count.start_bytes + gradient_bytes
