"""torch's private names: each is there and does what memwall needs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memwall.torch_internals import (
    autograd,
    compiler,
    dispatch,
    fake,
    modules,
    names,
    operators,
    optimizers,
    profiler,
    storages,
    trees,
)

# What a torch built for CPUs has no use for.
OF_CUDA = ("torch._C._cuda_clearCublasWorkspaces",)
# torch 2.11 has none; what is done there is said in memwall/torch_internals/allocator.py.
OF_LATER_RELEASES = ("torch._C._accelerator_getAllocatorSettings",)
PRESENT = [path for path in sorted(names.REGISTRY) if path not in OF_CUDA + OF_LATER_RELEASES]
ON_CLASSES = [path for path in PRESENT if not names.REGISTRY[path].is_on_instances]


def leaf() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("path", ON_CLASSES)
def test_a_name_is_there(path: str) -> None:
    assert names.find(path, names.REGISTRY[path].needed_for) is not None


def test_backward_is_told_by_its_node_its_number_and_its_pass() -> None:
    seen: list[Any] = []
    before = autograd.next_sequence_number()
    result = leaf().mul(2)
    node = result.grad_fn
    result.register_hook(lambda _: seen.append((autograd.current_backward() >= 0, autograd.current_node())))
    result.sum().backward()
    assert autograd.sequence_number_of(node) == before
    assert seen[0][0]
    assert seen[0][1] is not None
    assert (autograd.current_node(), autograd.current_backward()) == (None, -1)


def test_a_callback_runs_when_the_backward_ends() -> None:
    order: list[str] = []
    parameter = leaf()
    inner = parameter.mul(2)
    inner.register_hook(lambda _: autograd.after_backward(lambda: order.append("end")))
    parameter.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    inner.sum().backward()
    assert order == ["gradient", "end"]


def test_a_node_tells_the_dtype_of_what_it_computed() -> None:
    node = leaf().to(torch.bfloat16).mul(2).grad_fn
    assert list(autograd.input_dtypes(node)) == [torch.bfloat16]


def test_a_version_counts_writes_also_by_views() -> None:
    tensor = torch.zeros(4)
    view = tensor[:2]
    before = autograd.version_of(tensor)
    view.add_(1)
    assert autograd.version_of(tensor) == before + 1


def test_tensors_of_one_memory_tell_whether_their_writes_count_together() -> None:
    tensor = torch.ones(4)
    assert autograd.are_counted_together(tensor, tensor[:2])
    assert autograd.are_counted_together(tensor, tensor.detach()[2:])
    assert not autograd.are_counted_together(*tensor.unsafe_chunk(2))
    assert not autograd.are_counted_together(tensor, tensor.data)
    assert tensor._version == 0


def test_the_innermost_hooks_and_those_on_gradients_are_shown() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    assert autograd.innermost_saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert autograd.innermost_saved_tensor_hooks() == (pack, pack)
    parameter = leaf()
    assert autograd.accumulation_hooks(parameter) == {}
    parameter.register_post_accumulate_grad_hook(print)
    assert list(autograd.accumulation_hooks(parameter).values()) == [print]


@pytest.mark.parametrize("ends_within", [False, True])
def test_hooks_beneath_those_of_a_script_end_before_or_after_them(*, ends_within: bool) -> None:
    """GIVEN hooks that begin within a script's WHEN either ends first THEN the other's are as they were."""
    own: list[str] = []
    scripts: list[str] = []
    leaf_ = leaf()

    def passes(seen: list[str]) -> tuple[Any, Any]:
        return (lambda tensor: (seen.append("packed"), tensor)[1]), lambda tensor: tensor

    beneath = autograd.SavedTensorHooksBeneath(*passes(own))
    with torch.autograd.graph.saved_tensors_hooks(*passes(scripts)):
        with torch.autograd.graph.saved_tensors_hooks(*passes(scripts)):
            beneath.begin()
            leaf_.exp()
        leaf_.exp()
        if ends_within:
            beneath.end()
        assert (len(own), len(scripts)) == (0, 2)
    leaf_.exp()
    assert len(own) == (0 if ends_within else 1)
    if not ends_within:
        beneath.end()
    assert len(scripts) == 2
    assert autograd.innermost_saved_tensor_hooks() is None


def test_a_transform_of_functions_is_seen() -> None:
    seen: list[bool] = []

    def square(x: Tensor) -> Tensor:
        seen.append(autograd.execution_is_transformed())
        return x * x

    torch.func.vmap(square)(torch.ones(2))
    assert seen == [True]
    assert not autograd.execution_is_transformed()


class Counting(dispatch.TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("unseen", [dispatch.without_dispatch_modes, dispatch.without_dispatch])
def test_a_mode_sees_operations_but_not_those_that_are_hidden(unseen: Callable[[], Any]) -> None:
    assert not dispatch.has_modes()
    with Counting() as mode:
        assert dispatch.has_modes()
        assert dispatch.active_dispatch_modes() == [mode]
        torch.ones(1)
        with unseen():
            torch.ones(1)
    assert mode.num_seen == 1


class Wrapping(Tensor):
    """A tensor without memory."""

    __torch_function__ = dispatch.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.full((2, 3), len(str(func)))


def test_a_wrapper_has_a_shape_and_answers_operations_itself() -> None:
    made = dispatch.make_wrapper(Wrapping, (2, 3), dtype=torch.bfloat16, device="cpu")
    assert (type(made), made.shape, made.dtype) == (Wrapping, (2, 3), torch.bfloat16)
    assert made.neg().tolist() == [[len("aten.neg.default")] * 3] * 2


@pytest.mark.parametrize("unseen", [dispatch.without_subclass_functions, dispatch.without_function_modes])
def test_a_subclass_is_left_alone(unseen: Callable[[], Any]) -> None:
    seen: list[Any] = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(1).as_subclass(Watched)
    with unseen():
        tensor.neg()
    assert seen == []
    tensor.neg()
    assert seen


def test_an_operator_tells_what_it_is_called_and_what_it_writes() -> None:
    add_ = torch.ops.aten.add_.Tensor
    assert operators.packet_of(add_) is torch.ops.aten.add_
    assert operators.schema_of(add_).is_mutable
    assert operators.operator_named("_grouped_mm.default") is torch.ops.aten._grouped_mm.default
    assert operators.flop_formulas[torch.ops.aten.mm]((2, 3), (3, 4)) == 48
    # Keys of fewer heads than queries, which the formula of torch 2.11 refuses; every head of the query does its part.
    query, key = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 16, 4, device="meta")
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert operators.num_flops(attention, (query, key, key), {}, query) == 2 * (2 * 2 * 8 * 16 * 16 * 4)
    assert operators.num_flops(torch.ops.aten.view.default, (query, [-1]), {}, query) == 0


def test_a_kernel_for_autocast_can_be_added_for_a_time_and_passed_by() -> None:
    assert operators.has_kernel("aten::mm", "AutocastCPU")
    assert not operators.has_kernel("aten::exp", "AutocastCPU")
    with operators.library_for_now("aten", "IMPL") as library:
        library.impl("exp", lambda x: x, "AutocastCPU")
        with torch.autocast("cpu"):
            assert torch.exp(torch.zeros(1)).item() == 0.0
            with operators.without_cpu_autocast():
                assert torch.exp(torch.zeros(1)).item() == 1.0
    assert not operators.has_kernel("aten::exp", "AutocastCPU")


def test_lists_of_tensors_are_added_to_and_divided() -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    operators.foreach_add_(tensors, 1.0)
    operators.foreach_div_(tensors, torch.tensor(4.0))
    assert [tensor.tolist() for tensor in tensors] == [[0.5], [0.5, 0.5]]


def test_fake_tensors_have_shapes_and_no_values() -> None:
    with fake.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False) as mode:
        tensor = torch.ones(2, 3)
        assert isinstance(tensor, fake.FakeTensor)
        with pytest.raises(fake.DataDependentOutputException):
            tensor.sum().item()
        with pytest.raises(fake.DynamicOutputShapeException):
            torch.nonzero(tensor)
        with fake.unset_fake_temporarily():
            assert torch.ones(1).item() == 1.0
        with fake.without_truncated_sampling():
            nn.init.trunc_normal_(tensor)
    with fake.FakeCopyMode(mode):
        assert isinstance(type(tensor).__torch_dispatch__, object)


def test_storages_are_known_by_identity_and_by_who_refers_to_them() -> None:
    tensor = torch.ones(2)
    storage = tensor.untyped_storage()
    num_before = storages.num_references(storage)
    view = tensor[:1]
    assert storages.num_references(storage) == num_before + 1
    assert storages.identity_of(view.untyped_storage()) == storages.identity_of(storage)
    reference = storages.StorageWeakRef(storage)
    assert not reference.expired()
    del storage, view, tensor
    assert reference.expired()


def test_a_weak_dict_forgets_the_tensors_that_died() -> None:
    found, kept, other = storages.weak_tensor_dict(), torch.zeros(1), torch.zeros(1)
    found[kept], found[other] = "kept", "other"
    assert (found[kept], found[other]) == ("kept", "other")
    del other
    assert list(found.values()) == ["kept"]


def test_a_sparse_tensor_shows_what_has_not_been_summed_up() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=False)
    assert storages.sparse_indices(tensor).tolist() == [[1, 1]]
    assert storages.sparse_values(tensor).tolist() == [2.0, 3.0]
    assert storages.sparse_nnz(tensor) == 2


def test_allocations_are_reported_to_the_legacy_profiler() -> None:
    assert profiler.begin_watching_allocations()
    assert not profiler.begin_watching_allocations()
    tensor = torch.empty(1000)
    del tensor
    assert profiler.end_watching_allocations() == [4000, -4000]


def test_step_hooks_are_in_an_order_that_can_be_changed() -> None:
    parameter = leaf()
    optimizer = torch.optim.SGD([parameter])
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("first"))
    second = optimizer.register_step_pre_hook(lambda *_: seen.append("second"))
    optimizer.register_step_post_hook(lambda *_: seen.append("third"))
    after = optimizer.register_step_post_hook(lambda *_: seen.append("fourth"))
    optimizers.step_pre_hooks(optimizer).move_to_end(second.id, last=False)
    optimizers.step_post_hooks(optimizer).move_to_end(after.id, last=False)
    optimizer.step()
    assert seen == ["second", "first", "fourth", "third"]
    assert optimizers.group_initialiser_of(torch.optim.AdamW) is not optimizers.group_initialiser_of(torch.optim.SGD)


def test_schedulers_inside_another_are_shown() -> None:
    inner = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([leaf()]))
    assert list(optimizers.inner_schedulers(torch.optim.lr_scheduler.ChainedScheduler([inner]))) == [inner]
    assert optimizers.inner_schedulers(inner) == ()


def test_what_is_put_into_a_modules_dicts_is_the_modules() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    weight, mean = nn.Parameter(torch.zeros(2)), torch.ones(2)
    modules.own_parameters(norm)["weight"] = weight
    modules.own_buffers(norm)["running_mean"] = mean
    assert norm.weight is weight
    assert norm.running_mean is mean
    assert modules.without_state_dict_entry(norm) == {"scratch"}
    modules.with_parameters(norm, {"weight": None})
    assert norm.weight is None


def test_what_goes_through_a_data_loader_is_told() -> None:
    loader = DataLoader([1])
    assert modules.is_loader_iterator(iter(loader))
    assert not modules.is_loader_iterator(loader)
    assert not modules.is_loader_iterator(iter([1]))


@pytest.mark.slow
def test_running_norms_and_compiled_modules_are_told() -> None:
    assert modules.is_running_norm(nn.BatchNorm2d(1))
    assert not modules.is_running_norm(nn.LayerNorm(1))
    in_place, forward = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")  # type: ignore[method-assign]
    of = compiler.compiled_form
    assert of(torch.compile(nn.Linear(1, 1))) == "wrapper"  # type: ignore[arg-type]
    assert (of(in_place), of(forward), of(nn.Linear(1, 1))) == ("in place", "forward", None)
    wrapper = torch.compile(nn.Sequential(nn.Linear(1, 1)))
    assert len(list(compiler.inside_compiled(nn.Sequential(wrapper, nn.Linear(1, 1))))) == 2  # type: ignore[arg-type]


def test_nested_values_are_walked_through() -> None:
    nested = {"a": [1, (2.0,)]}
    assert trees.tree_leaves(nested) == [1, 2.0]
    assert trees.tree_flatten(nested)[0] == [1, 2.0]
    assert trees.tree_map(lambda value: value + 1, nested) == {"a": [2, (3.0,)]}
    assert trees.tree_map_only(int, lambda value: value + 1, nested) == {"a": [2, (2.0,)]}
