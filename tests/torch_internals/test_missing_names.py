"""Without one of torch's private names, the door says what is missing when it is asked, and all modules import.

A name is taken away from torch itself where torch lets it go, and from the look-up where it does not (attributes of
classes written in C). The door's modules are then loaded afresh, as copies beside those that memwall uses.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memwall.errors import NotAvailableError
from memwall.patches import Patches
from memwall.torch_internals import (
    allocator,
    autograd,
    compiler,
    device_time,
    dispatch,
    fake,
    modules,
    names,
    operators,
    optimizers,
    partitioner,
    process_groups,
    profiler,
    reducer,
    sharding,
    storages,
    transforms,
    trees,
)

ROOT = Path(__file__).parent.parent.parent
RAISES = "raises"
FAKE = "torch._subclasses.fake_tensor"
DISPATCH = "torch.utils._python_dispatch"
Asked = Callable[[ModuleType], Any]


def leaf() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def node() -> Any:
    return leaf().mul(1).grad_fn


WITHOUT: dict[ModuleType, dict[str, tuple[Asked, Any]]] = {
    allocator: {
        "torch._C._accelerator_getAllocatorSettings": (lambda door: door.settings_in_force(), None),
        "torch._C._accelerator_setAllocatorSettings": (lambda door: door.set_settings(""), RAISES),
        "torch.cuda.memory._snapshot": (lambda door: door.snapshot(), RAISES),
        "torch.cuda.memory._record_memory_history": (lambda door: door.record_history(), RAISES),
        "torch._C._cuda_clearCublasWorkspaces": (lambda door: door.clear_cublas_workspaces(), None),
    },
    autograd: {
        "torch._C._current_autograd_node": (lambda door: door.current_node(), RAISES),
        "torch._C._functions.AccumulateGrad._sequence_nr": (lambda door: door.sequence_number_of(node()), RAISES),
        "torch.autograd._get_sequence_nr": (lambda door: door.next_sequence_number(), RAISES),
        "torch._C._current_graph_task_id": (lambda door: door.current_backward(), RAISES),
        "torch.Tensor._version": (lambda door: door.version_of(leaf()), RAISES),
        "torch._C._autograd._unsafe_set_version_counter": (
            lambda door: door.are_counted_together(leaf(), leaf()),
            False,
        ),
        "torch._C._autograd._top_saved_tensors_default_hooks": (
            lambda door: door.innermost_saved_tensor_hooks(),
            RAISES,
        ),
        "torch._C._autograd._push_saved_tensors_default_hooks": (
            lambda door: door.SavedTensorHooksBeneath(leaf, leaf).begin(),
            RAISES,
        ),
        "torch._C._autograd._pop_saved_tensors_default_hooks": (lambda door: door._pop_hooks(), RAISES),
        "torch.autograd.Variable._execution_engine.queue_callback": (lambda door: door.after_backward(print), RAISES),
        "torch._C._functorch.peek_interpreter_stack": (lambda door: door.execution_is_transformed(), RAISES),
        "torch._C._functions.AccumulateGrad._input_metadata": (lambda door: door.input_dtypes(node()), RAISES),
        "torch.Tensor._post_accumulate_grad_hooks": (lambda door: door.accumulation_hooks(leaf()), RAISES),
    },
    compiler: {
        "torch._ops.HigherOrderOperator": (lambda door: door.is_region(torch.ops.higher_order.cond), False),
    },
    device_time: {"torch.cuda._sleep": (lambda door: door.keep_busy(1), None)},
    dispatch: {
        f"{DISPATCH}.TorchDispatchMode": (lambda door: door.TorchDispatchMode(), RAISES),
        f"{DISPATCH}._disable_current_modes": (lambda door: door.without_dispatch_modes(), RAISES),
        f"{DISPATCH}._get_current_dispatch_mode_stack": (lambda door: door.active_dispatch_modes(), RAISES),
        "torch._C._DisableTorchDispatch": (lambda door: door.without_dispatch(), RAISES),
        "torch._C.DisableTorchFunction": (lambda door: door.without_function_modes(), RAISES),
        "torch._C.DisableTorchFunctionSubclass": (lambda door: door.without_subclass_functions(), RAISES),
        "torch._C._disabled_torch_function_impl": (lambda door: door.disabled_torch_function(), RAISES),
        "torch._C._len_torch_function_stack": (lambda door: door.has_modes(), RAISES),
        "torch._C._len_torch_dispatch_stack": (lambda door: door.has_modes(), RAISES),
        "torch.Tensor._make_wrapper_subclass": (lambda door: door.make_wrapper(Tensor, (1,)), RAISES),
        "torch.Tensor._backward_hooks": (lambda door: len(door.reading_no_elements()), 5),
        "torch.Tensor._is_view": (lambda door: len(door.reading_no_elements()), 6),
    },
    fake: {
        **{
            f"{FAKE}.{name}": (lambda door, name=name: getattr(door, name)(), RAISES)
            for name in (
                *("FakeTensor", "FakeTensorMode", "FakeCopyMode", "unset_fake_temporarily"),
                *("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"),
            )
        },
        "torch.nn.init._no_grad_trunc_normal_": (lambda door: drawn_without_sampling(door), [1.0, 1.0, 1.0]),
    },
    modules: {
        "torch.nn.Module._modules": (lambda door: door.own_modules(torch.Generator()), RAISES),
        "torch.nn.Module._parameters": (lambda door: door.own_parameters(torch.Generator()), RAISES),
        "torch.nn.Module._buffers": (lambda door: door.own_buffers(torch.Generator()), RAISES),
        "torch.nn.Module._non_persistent_buffers_set": (
            lambda door: door.without_state_dict_entry(torch.Generator()),
            RAISES,
        ),
        "torch.utils.data.dataloader._BaseDataLoaderIter": (
            lambda door: door.is_loader_iterator(iter(DataLoader([1]))),
            False,
        ),
        "torch.nn.modules.batchnorm._NormBase": (lambda door: door.is_running_norm(nn.BatchNorm2d(1)), True),
        "torch.nn.Module._apply": (lambda door: door.when_moved(Patches("moves"), lambda _: None), None),
    },
    operators: {
        **{
            f"torch.ops.aten.{name}": (lambda door, name=name: door.operator_named(name)(), RAISES)
            for name in operators._NEEDED_FOR
        },
        "torch.ops.aten.add.Tensor._schema": (lambda door: door.schema_of(torch.ops.aten.mm.default), RAISES),
        "torch.ops.aten.add.Tensor._overloadpacket": (lambda door: door.packet_of(torch.ops.aten.mm.default), RAISES),
        "torch._C._dispatch_has_kernel_for_dispatch_key": (lambda door: door.has_kernel("a", "b"), RAISES),
        "torch.library._scoped_library": (lambda door: door.library_for_now("aten", "IMPL"), RAISES),
        "torch._C._ExcludeDispatchKeyGuard": (lambda door: door.without_cpu_autocast(), RAISES),
        "torch._C.DispatchKeySet": (lambda door: door.without_cpu_autocast(), RAISES),
        "torch._C.DispatchKey.AutocastCPU": (lambda door: door.without_cpu_autocast(), RAISES),
        "torch._foreach_add_": (lambda door: door.foreach_add_([], 1.0), RAISES),
        "torch._foreach_div_": (lambda door: door.foreach_div_([], leaf()), RAISES),
        "torch._VF": (lambda door: door.recurrent_functions, None),
        "torch.utils.flop_counter.flop_registry": (lambda door: dict(door.flop_formulas), {}),
        "torch.utils.flop_counter.register_flop_formula": (lambda door: door.flop_formula_of(None)(print), print),
    },
    optimizers: {
        "torch.optim.Optimizer._optimizer_step_pre_hooks": (lambda door: door.step_pre_hooks(print), RAISES),
        "torch.optim.Optimizer._optimizer_step_post_hooks": (lambda door: door.step_post_hooks(print), RAISES),
        "torch.optim.SGD._init_group": (lambda door: door.group_initialiser_of(object), None),
    },
    partitioner: {
        f"torch._functorch.partitioners.{name}": (lambda door: cut_with_compiler(door), None)
        for name in ("choose_saved_values_set", "_size_of")
    },
    process_groups: {
        "torch.distributed.distributed_c10d._get_default_store": (lambda door: door.store_of_all(), RAISES),
    },
    reducer: {
        path: (lambda door: door.buckets_of(SimpleNamespace(_has_rebuilt_buckets=True, static_graph=False)), [])
        for path in (
            "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
            "torch.nn.parallel.DistributedDataParallel._build_params_for_reducer",
            "torch.nn.parallel.DistributedDataParallel._build_debug_param_to_name_mapping",
            "torch.nn.parallel.DistributedDataParallel._ddp_init_helper",
            "torch.distributed._compute_bucket_assignment_by_size",
        )
    }
    | {
        f"torch.{path}": (lambda door: door.is_reducible(SimpleNamespace(static_graph=False)), False)
        for path in (
            *(f"distributed.Reducer.{name}" for name in ("prepare_for_forward", "prepare_for_backward")),
            *("distributed.Reducer._rebuild_buckets", "nn.parallel.DistributedDataParallel._sync_buffers"),
            "nn.parallel.DistributedDataParallel.will_sync_module_buffers",
        )
    },
    sharding: {
        "torch.distributed.tensor.DTensor._local_tensor": (lambda door: door.shard_of(leaf()), RAISES),
    },
    profiler: {
        f"torch._C.{name}": (lambda door: (door.has_allocation_events, door.begin_watching_allocations()), RAISES)
        for name in (
            *("_autograd._enable_profiler_legacy", "_autograd._disable_profiler_legacy"),
            *("_profiler.ProfilerConfig", "_profiler.ProfilerState", "_profiler._ExperimentalConfig"),
        )
    },
    storages: {
        "torch.multiprocessing.reductions.StorageWeakRef": (lambda door: door.StorageWeakRef(), RAISES),
        "torch.utils.weak.WeakTensorKeyDictionary": (lambda door: door.weak_tensor_dict(), RAISES),
        "torch.UntypedStorage._cdata": (lambda door: door.identity_of(leaf().untyped_storage()), RAISES),
        "torch._C._storage_Use_Count": (lambda door: door.num_references(leaf().untyped_storage()), RAISES),
        **{
            f"torch.Tensor._{name}": (lambda door, name=name: getattr(door, f"sparse_{name}")(leaf()), RAISES)
            for name in ("indices", "values", "nnz")
        },
    },
    transforms: {
        path: (lambda door: door.without_needless_graphs(Patches("a test")), None)
        for path in (
            "torch.autograd.function._HookMixin",
            *(f"torch._functorch.eager_transforms.{name}" for name in ("_autograd_grad", "_grad_increment_nesting")),
            *(
                f"torch._C._functorch.{name}"
                for name in ("get_interpreter_stack", "TransformType", "maybe_get_level", "get_unwrapped")
            ),
        )
    },
    trees: {
        f"torch.utils._pytree.{name}": (lambda door, name=name: getattr(door, name)([]), RAISES)
        for name in ("tree_flatten", "tree_leaves", "tree_map", "tree_map_only")
    },
}


def drawn_without_sampling(door: ModuleType) -> Any:
    tensor = torch.ones(3)
    with door.without_truncated_sampling():
        nn.init.trunc_normal_(tensor)
    return tensor.tolist()


def cut_with_compiler(door: ModuleType) -> Any:
    importlib.import_module("torch._functorch.config")
    return door.cut_by(lambda saved_bytes, ratio: ratio)


def take_away(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a name away from torch, or where torch does not let it go, from the look-up."""
    walked = names._walk
    owner, _, last = path.rpartition(".")
    try:
        monkeypatch.delattr(walked(owner), last)
    except (AttributeError, TypeError):
        monkeypatch.setattr(names, "_walk", lambda asked: None if asked == path else walked(asked))
    if walked(path) is not None:  # an operator comes back by itself
        monkeypatch.setattr(names, "_walk", lambda asked: None if asked == path else walked(asked))


def afresh(door: ModuleType) -> ModuleType:
    """A module of the door, loaded once more as a copy."""
    spec = importlib.util.spec_from_file_location(f"{door.__name__}_afresh", str(door.__file__))
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_each_name_is_tried() -> None:
    assert {path for cases in WITHOUT.values() for path in cases} == set(names.REGISTRY)


@pytest.mark.parametrize(
    ("door", "path"),
    [pytest.param(door, path, id=path) for door, cases in WITHOUT.items() for path in cases],
)
def test_without_a_name_the_door_says_so_when_it_is_asked(
    door: ModuleType, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, expected = WITHOUT[door][path]
    take_away(path, monkeypatch)
    copy = afresh(door)
    if expected is not RAISES:
        assert ask(copy) == expected
        return
    with pytest.raises(NotAvailableError) as caught:
        ask(copy)
    assert f" is not available with torch {torch.__version__}, which has no {path}; take torch " in str(caught.value)
    assert caught.value.name == path


WITHOUT_ALL = """
import importlib, json, sys
from memwall.torch_internals import names

paths, modules = map(set, json.loads(sys.argv[1]))
walked, names._walk = names._walk, lambda path: None if path in paths else walked(path)
failed = {}
for module in sorted(modules):
    try:
        importlib.import_module(module)
    except Exception as error:
        failed[module] = repr(error)
print(json.dumps(failed))
"""


def modules_of_memwall() -> list[str]:
    """All of them but those with triton's own code, which need triton, and `__main__`, which runs the command."""
    paths = [*(ROOT / "memwall").rglob("*.py"), *((ROOT / "triton_kernels").rglob("*.py"))]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths if "import triton" not in path.read_text()]
    dotted = [".".join(("memwall" if part[0] == "triton_kernels" else "", *part)).strip(".") for part in parts]
    return [name.removesuffix(".__init__") for name in dotted if not name.endswith("__main__")]


@pytest.mark.slow
def test_all_modules_import_where_torch_has_none_of_the_names() -> None:
    """In one process the look-up finds none: torch itself, which has uses of its own for them, keeps them."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ALL, json.dumps([sorted(names.REGISTRY), modules_of_memwall()])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
