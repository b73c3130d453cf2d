"""What of memwall lives as long as its process: every module-level name that changes, and what resets it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import memwall

_PACKAGE = Path(memwall.__file__).parent
_EMPTY = {"list", "dict", "set", "deque", "defaultdict", "OrderedDict"}
_WEAK = {"WeakSet", "WeakValueDictionary", "WeakKeyDictionary", "WeakTensorKeyDictionary"}
_STATEFUL = _EMPTY | _WEAK | {"Lock", "RLock", "local", "count", "Patches"}
_GROWING = {"append", "add", "extend", "insert", "setdefault", "update"}
_CHANGING = _GROWING | {"clear", "discard", "pop", "popitem", "remove"}

_FOREVER = "nothing: the answer holds as long as the process"

STATE = {
    # What a session, a run or a recording has in force.
    "memwall.apply.memory.allocator._owners": "AllocatorHandler.undo",
    "memwall.apply.memory.cuda_setting._variables": "restore_variables, when a session closes",
    "memwall.apply.offload.parking._needed": "close_unneeded, and the end of the last graph that saved there",
    "memwall.apply.offload.parking._closing": "its holder",
    "memwall.apply.optimizer_state.kept_space._present": "set_kept_space(None), when a run ends",
    "memwall.apply.streaming.guard._guards": "unguarded, when a parameter leaves its tier",
    "memwall.apply.streaming.gradients._plain_gradients": "the end of the tensor: it holds none",
    "memwall.apply.techniques.compiled_graphs._cuts": "the end of the model",
    "memwall.checkpoint.ending._present": "Ending.let_go, when a run ends, and in a child",
    "memwall.checkpoint.reachable._caller": "set_checkpoint(None), when a run ends",
    "memwall.checkpoint.resumption._present": "set_checkpoint(None), when a run ends",
    "memwall.machine.device_peaks._separate": "SeparatePeaks.undo, when a session closes",
    "memwall.patches._active": "Patch.undo, and the end of the object that was changed",
    "memwall.patches._values": "the end of the patch: it holds nothing",
    "memwall.store.directory_lock._held": "DirectoryLock.release",
    "memwall.store.room._giving": "CudaLimit.end_giving, when a step ends",
    "memwall.trace.seeding._hearing": "hearing_seeds, as it ends",
    "memwall.store.page_map._maps": "the end of the map: it holds nothing",
    # What was done once for the process.
    "memwall.checkpoint.ending._ended": "the next run that a signal ends",
    "memwall.checkpoint.ending._is_over": "nothing: the process ends",
    "memwall.checkpoint.ending._let_go_in_children": "nothing: Python keeps the hook",
    "memwall.checkpoint.ending._look_after_exit": "nothing: Python calls it as it ends",
    "memwall.rows.optimizer._is_installed": "nothing: torch keeps the hooks",
    "memwall.apply.technique._discover": "nothing: the folder of techniques is read once",
    "memwall.apply.technique._handlers": "unregister",
    "memwall.planning.technique._load": "nothing: the folder of techniques is read once",
    "memwall.planning.technique._ordered": "unregister",
    "memwall.planning.technique._registry": "unregister",
    "memwall.torch_internals.reducer._kept": "nothing: the groups stay to the end",
    "memwall.torch_internals.names.REGISTRY": "nothing: an entry for each private name of torch",
    "memwall.torch_internals.dispatch._here": "end_stand_in, before a forward and when a session closes",
    "memwall.trace.op_work.OWN_WORK": "nothing: an entry for each of memwall's own operators",
    # Locks and numbers.
    "memwall.patches._numbers": "nothing: a number is given once",
    "memwall.store.directory_lock._guard": "its holder",
    "memwall.planning.solver.quiet_streams._guard": "its holder",
    "memwall.planning.technique._loading": "its holder",
    "memwall.machine.meter._kept": "itself, in a child: the file of /proc that is read again and again stays open",
    # What is found out once: libraries, figures of the machine, answers about operators.
    "memwall.apply.offload.entry._EMPTY": "nothing: one tensor without elements for each device and dtype",
    "memwall.apply.blocks.outer_variables._global_names": "itself, at 1024 functions",
    "memwall.apply.offload.engine._hidden": _FOREVER,
    "memwall.apply.offload.machine_below._measured_memory": "ten minutes",
    "memwall.machine.disk_probe._measured": "itself, ten minutes after the disk was measured",
    "memwall.torch_internals.saved.described": "itself, at 1024 texts",
    "memwall.predict.malloc.malloc_replay._replays": "itself, at 16 forecasts",
    "memwall.apply.blocks.numpy_random._last": "the next state that is asked for",
    "memwall.apply.streaming.streamed_parameter.usual_references": _FOREVER,
    "memwall.machine.device_sharers._before": "note_sharers, when a run begins",
    "memwall.machine.device_sharers._library": _FOREVER,
    "memwall.machine.hardware._shipped": _FOREVER,
    "memwall.planning.techniques.recompute._is_random": _FOREVER,
    "memwall.predict.cuda.context.measured_context_bytes": _FOREVER,
    "memwall.predict.malloc.malloc_replay._reason_of_library": _FOREVER,
    "memwall.predict.malloc.tensor_heap.heap_library": _FOREVER,
    "memwall.rows.initial._levels": "itself, at 2 tensors of 65,536 numbers",
    "memwall.rows.loops.rows_library": _FOREVER,
    "memwall.rows.page_swaps.pages_library": _FOREVER,
    "memwall.store.checksum._library": _FOREVER,
    "memwall.torch_internals.operators.written_places": _FOREVER,
    "memwall.trace.recurrent._workspace_bytes": _FOREVER,
}
"""By name: what empties it, or sets it back."""


def test_every_name_that_changes_is_declared_with_what_resets_it() -> None:
    found = {
        f"{'.'.join(path.relative_to(_PACKAGE.parent).with_suffix('').parts)}.{name}"
        for path in _PACKAGE.rglob("*.py")
        for name in _names(ast.parse(path.read_text()))
    }
    assert found == set(STATE)


@pytest.mark.parametrize(
    "source",
    [
        "found = {}",
        "found: list[int] = []",
        "found = collections.deque(maxlen=3)",
        "found = threading.Lock()",
        "found = {1: 2}\ndef f():\n    found[3] = 4",
        "found = [1]\ndef f():\n    found.append(2)",
        "found = None\ndef f():\n    global found\n    found = 1",
        "@functools.cache\ndef found(): ...",
        "@lru_cache(maxsize=2)\ndef found(): ...",
    ],
)
def test_what_changes_is_found(source: str) -> None:
    assert list(_names(ast.parse(source))) == ["found"]


@pytest.mark.parametrize(
    "source",
    ["TABLE = {1: 2}", "NAMES = ['a']", "LIMIT = 3", "__all__ = ['f']", "def f():\n    made = []", "KINDS = set('ab')"],
)
def test_constants_are_not(source: str) -> None:
    assert not list(_names(ast.parse(source)))


def _names(module: ast.Module) -> Iterator[str]:
    changed = set(_changed(module))
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(one) for one in node.decorator_list):
            yield node.name
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and (target.id in changed or _is_stateful(node.value)):
                    yield target.id


def _changed(module: ast.Module) -> Iterator[str]:
    """Names that a function assigns, fills or empties."""
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from node.names
            continue
        is_stored = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if is_stored or (isinstance(node, ast.Attribute) and node.attr in _CHANGING):
            yield ast.unparse(node.value)


def _is_stateful(value: ast.expr) -> bool:
    """Whether an object is one that code fills or counts with: an empty container, a lock, a counter."""
    if isinstance(value, ast.List | ast.Set | ast.Dict):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    return name in _STATEFUL and not (name in _EMPTY and value.args)
