"""Mistakes that a script brings along from DistributedDataParallel to Accelerate and the Trainer, read off its source.

Nothing is run or imported. What is written in one file is seen, and said with its line; what a configuration elsewhere
says is not.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from memwall.errors import UsageError
from memwall.observe.script_source import Mistake, ScriptSource, keywords_of, name_of

_LOW = {"bfloat16", "float16", "half"}


def mistakes_in(path: Path) -> tuple[Mistake, ...]:
    """Returns what is wrong in a script, by line.

    Raises:
        UsageError: it cannot be read, or is no Python.
    """
    try:
        source = ScriptSource(ast.parse(path.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a Python script: {error}") from error
    found = (mistake for rule in _RULES for mistake in rule(source))
    return tuple(sorted(found, key=lambda mistake: (mistake.line, mistake.found)))


def _batch_of_a_device(source: ScriptSource) -> Iterator[Mistake]:
    if any(_is_true(keywords_of(call).get("split_batches")) for call in source.called("Accelerator")):
        return
    for call in source.calls:
        for keyword in call.keywords:
            is_loader = keyword.arg == "batch_size" and name_of(call.func) == "DataLoader" and source.is_distributed
            if not is_loader and keyword.arg not in ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"):
                continue
            # What is computed from it may well be a device's part, whatever divides it is called.
            if any(part in name_of(keyword.value) for part in ("global", "total")):
                yield Mistake(
                    line=keyword.value.lineno,
                    found=f"{keyword.arg} is of one device, and is given the global batch",
                    advice="divide it by the number of processes and by the accumulation steps",
                )


def _mean_over_ranks(source: ScriptSource) -> Iterator[Mistake]:
    if not source.is_distributed or source.called("all_reduce", "reduce", "gather") or _mentions_any(source, _COUNTS):
        return
    for call in source.called("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss"):
        keywords = keywords_of(call)
        if "ignore_index" in keywords and not _is_constant(keywords.get("reduction"), "sum", "none"):
            yield Mistake(
                line=call.lineno,
                found="the mean over a rank's own tokens is averaged over ranks: those with few labels count too much",
                advice='loop over `session.step(batch, over_ranks=True)`, or take reduction="sum" and divide by the '
                "number of labels on all ranks",
            )


def _clipping_before_unscaling(source: ScriptSource) -> Iterator[Mistake]:
    if not source.called("GradScaler"):
        return
    in_functions = {node for each in source.functions for statement in each.body for node in ast.walk(statement)}
    scopes = [[node for statement in each.body for node in ast.walk(statement)] for each in source.functions]
    for scope in (*scopes, [node for node in source.nodes if node not in in_functions]):
        calls = [node for node in scope if isinstance(node, ast.Call)]
        unscaled = [call for call in calls if name_of(call.func) == "unscale_"]
        if not any(
            name_of(call.func) in ("scale", "step") and "scaler" in ast.unparse(call.func) for call in calls
        ) or (
            not unscaled and source.called("unscale_")  # elsewhere, maybe before this is called
        ):
            continue
        for clip in (call for call in calls if name_of(call.func) in _CLIPS):
            if "accelerator" not in ast.unparse(clip.func) and not any(
                (call.lineno, call.col_offset) < (clip.lineno, clip.col_offset) for call in unscaled
            ):
                yield Mistake(
                    line=clip.lineno,
                    found="gradients are clipped while they are scaled: the bound is meant for unscaled ones",
                    advice="call scaler.unscale_(optimizer) before",
                )


def _clipping_each_micro_batch(source: ScriptSource) -> Iterator[Mistake]:
    for loop in source.loops:
        for window in (node for node in loop.body if isinstance(node, ast.If) and _is_window(node.test)):
            outside = [node for node in loop.body if node is not window]
            if not _optimizer_steps(window) or any(_optimizer_steps(node) for node in outside):
                continue
            for clip in (call for node in outside for call in _calls_within(node, *_CLIPS)):
                yield Mistake(
                    line=clip.lineno,
                    found="gradients are clipped after each micro-batch, before the rest of the window is added",
                    advice=f"clip once, just before the optimizer's step in line {window.lineno}",
                )


def _last_window(source: ScriptSource) -> Iterator[Mistake]:
    for loop in source.loops:
        if not isinstance(loop, ast.For) or name_of(getattr(loop.iter, "func", loop.iter)) == "range":
            continue  # how often it runs may be chosen so that windows come out even
        for window in (node for node in loop.body if isinstance(node, ast.If) and _is_window(node.test)):
            stepped = _optimizer_steps(window)
            later = [call for call in source.called("step") if call.lineno > (loop.end_lineno or 0)]
            if stepped and isinstance(window.test, ast.Compare) and not later and _is_filled_outside(window):
                yield Mistake(
                    line=window.lineno,
                    found="the last micro-batches of an epoch that fill no window are not stepped with, and are added "
                    "to the next epoch's first",
                    advice="step also where the loader ends (`or index + 1 == len(loader)`), with the loss divided by "
                    "how many there are",
                )


def _low_weights(source: ScriptSource) -> Iterator[Mistake]:
    if _mentions_any(source, _FROZEN):
        return  # a base that is not trained may be in 16 bits
    flagged = [call for call in source.calls if any(_is_true(keywords_of(call).get(name)) for name in ("bf16", "fp16"))]
    mixed = [call for call in source.calls if "mixed_precision" in keywords_of(call)]
    if not (flagged or mixed or source.called("autocast", "GradScaler")):
        return
    for call in source.calls:
        keywords, name = keywords_of(call), name_of(call.func)
        loaded = keywords.get("torch_dtype", keywords.get("dtype")) if name == "from_pretrained" else None
        cast = call.args[0] if name == "to" and call.args and "model" in ast.unparse(call.func) else None
        is_method = name in ("half", "bfloat16") and "model" in ast.unparse(call.func)
        if is_method or any(value is not None and name_of(value) in _LOW for value in (loaded, cast)):
            yield Mistake(
                line=call.lineno,
                found="weights, and with them the optimizer's state and every update, are in 16 bits, beside mixed "
                "precision, which is for weights in float32",
                advice="leave the weights in float32 and have autocast compute in 16 bits, or drop mixed precision",
            )


def _checkpointing_twice(source: ScriptSource) -> Iterator[Mistake]:
    # The Trainer's argument calls the model's method: both are one way.
    by_model = [*source.called("gradient_checkpointing_enable"), *_turned_on(source, "gradient_checkpointing")]
    by_fsdp = [
        *_turned_on(source, "activation_checkpointing"),
        *_true_in_dictionaries(source, "activation_checkpointing"),
    ]
    by_hand = source.called("apply_activation_checkpointing", "checkpoint_wrapper")
    ways = [found for found in (by_model, by_fsdp, by_hand) if found]
    if len(ways) > 1:
        lines = sorted(found[0].lineno for found in ways)
        yield Mistake(
            line=lines[-1],
            found=f"checkpointing is turned on a second time (the first is line {lines[0]}): blocks run three times",
            advice="keep one of them; memwall chooses blocks itself where none is on",
        )


def _zero_without_effect(source: ScriptSource) -> Iterator[Mistake]:
    configured = [key for key, _ in _in_dictionaries(source, "zero_optimization")]
    used = source.called("initialize", "DeepSpeedPlugin") or any("deepspeed" in keywords_of(c) for c in source.calls)
    if configured and not used and not source.called("dump"):
        yield Mistake(
            line=configured[0].lineno,
            found="a DeepSpeed configuration with ZeRO is made and given to nobody: nothing is divided",
            advice="give it to deepspeed.initialize(config=...), TrainingArguments(deepspeed=...) or DeepSpeedPlugin",
        )


def _data_parallel(source: ScriptSource) -> Iterator[Mistake]:
    for call in source.called("DataParallel"):
        yield Mistake(
            line=call.lineno,
            found="nn.DataParallel copies the model to each device in every step",
            advice="start one process for each device (torchrun), and take DistributedDataParallel",
        )


def _unused_and_reentrant(source: ScriptSource) -> Iterator[Mistake]:
    unused = [*_turned_on(source, "find_unused_parameters"), *_turned_on(source, "ddp_find_unused_parameters")]
    reentrant = [*_turned_on(source, "use_reentrant"), *_true_in_dictionaries(source, "use_reentrant")]
    if unused and reentrant:
        yield Mistake(
            line=min(node.lineno for node in reentrant),
            found="reentrant checkpointing hides parameters from DistributedDataParallel with "
            f"find_unused_parameters=True (line {unused[0].lineno}), and backward fails",
            advice="use_reentrant=False, or find_unused_parameters=False",
        )


def _processes_that_train(source: ScriptSource) -> Iterator[Mistake]:
    for call in source.called("spawn", "start_processes", "Process"):
        keywords, is_one = keywords_of(call), name_of(call.func) == "Process"
        target = keywords.get("target") if is_one else keywords.get("fn", call.args[0] if call.args else None)
        if target is None or not _trains(source, name_of(target)):
            continue
        count = keywords.get("nprocs", call.args[2] if len(call.args) > 2 else None)
        number = ast.unparse(count) if isinstance(count, ast.Constant) and not is_one else "N"
        yield Mistake(
            line=call.lineno,
            found=f"{name_of(target)} trains in processes that the script starts: memwall is not in them, and their "
            "memory is not planned",
            advice="call it in the script itself, with RANK and WORLD_SIZE from the environment, and start that by "
            f"memwall run --nproc {number} --budget SIZE SCRIPT",
        )


def _trains(source: ScriptSource, name: str) -> bool:
    """Tells whether a function calls backward, itself or in another one of the file.

    Of one from elsewhere its name tells, or that the script shares its model's memory with it.
    """
    known = {function.name: function for function in source.functions}
    if name not in known:
        return name.startswith("train") or bool(source.called("share_memory"))
    waiting, seen = [name], set[str]()
    while waiting:
        function = known[waiting.pop()]
        seen.add(function.name)
        called = {name_of(call.func) for call in ast.walk(function) if isinstance(call, ast.Call)}
        if called & {"backward", "train"} - known.keys():
            return True
        waiting += (called & known.keys()) - seen
    return False


def _pipelines(source: ScriptSource) -> Iterator[Mistake]:
    schedules = {
        target.id: call
        for call in source.calls
        if name_of(call.func).startswith("Schedule")
        for assigned in source.nodes
        if isinstance(assigned, ast.Assign) and assigned.value is call
        for target in assigned.targets
        if isinstance(target, ast.Name)
    }
    for call in source.called(*_ZERO_BUBBLE):
        yield Mistake(
            line=call.lineno,
            found=f"{name_of(call.func)} runs backward twice through what is saved, which no plan makes smaller: "
            "memwall refuses it",
            advice="take Schedule1F1B or ScheduleInterleaved1F1B under a budget",
        )
    quiet = set(map(id, source.within("no_grad", "inference_mode")))
    for call in source.called("eval"):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in schedules and id(call) not in quiet:
            yield Mistake(
                line=call.lineno,
                found=f"{owner.id}.eval keeps the graphs of all its micro-batches until the next step: it turns no "
                "gradients off",
                advice="call it in torch.no_grad()",
            )


_RULES: tuple[Callable[[ScriptSource], Iterator[Mistake]], ...] = (
    _batch_of_a_device,
    _mean_over_ranks,
    _clipping_before_unscaling,
    _clipping_each_micro_batch,
    _last_window,
    _low_weights,
    _checkpointing_twice,
    _zero_without_effect,
    _data_parallel,
    _pipelines,
    _processes_that_train,
    _unused_and_reentrant,
)
_ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_FROZEN = ("get_peft_model", "peft_config", "LoraConfig", "requires_grad_", "requires_grad")
_COUNTS = ("over_ranks", "num_items_in_batch", "num_tokens")


def _is_constant(node: ast.AST | None, *values: object) -> bool:
    return isinstance(node, ast.Constant) and node.value in values


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _turned_on(source: ScriptSource, keyword: str) -> list[ast.Call]:
    """Returns the calls that are given True by this name."""
    return [call for call in source.calls if _is_true(keywords_of(call).get(keyword))]


def _in_dictionaries(source: ScriptSource, name: str) -> list[tuple[ast.expr, ast.expr]]:
    """Returns keys of this name in dictionaries that are written out, each with its value."""
    dictionaries = (node for node in source.nodes if isinstance(node, ast.Dict))
    items = (item for each in dictionaries for item in zip(each.keys, each.values, strict=True))
    return [(key, value) for key, value in items if key is not None and _is_constant(key, name)]


def _true_in_dictionaries(source: ScriptSource, name: str) -> list[ast.expr]:
    return [value for _, value in _in_dictionaries(source, name) if _is_true(value)]


def _mentions_any(source: ScriptSource, names: tuple[str, ...]) -> bool:
    found = {name_of(node) for node in source.nodes} | {
        keyword for call in source.calls for keyword in keywords_of(call)
    }
    return not found.isdisjoint(names)


def _is_window(test: ast.expr) -> bool:
    """Returns whether a condition is that a window of micro-batches is full: it has a remainder in it."""
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test))


def _is_filled_outside(window: ast.If) -> bool:
    """Tells whether a window that is full has gradients of earlier batches: a model that is trained less often has not.

    Where the step's branch calls backward and the other one does not, all gradients are of that batch.
    """
    branches = (window.body, window.orelse)
    backward = [any(_calls_within(node, "backward") for node in branch) for branch in branches]
    return backward[0] == backward[1]


def _optimizer_steps(node: ast.AST) -> list[ast.Call]:
    """Returns the steps of an optimizer below a node, those by a scaler too; a scheduler's are none."""
    return [call for call in _calls_within(node, "step") if "optim" in ast.unparse(call)]


def _calls_within(node: ast.AST, *names: str) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call) and name_of(each.func) in names]
