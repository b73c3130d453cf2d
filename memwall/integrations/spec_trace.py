"""Makes a trace of a SPEC without a device: of a Workload's factory or a Hugging Face configuration."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from memwall.errors import MemwallError, NeedsValuesError, TraceError, UsageError
from memwall.integrations.hugging_face.hf_config import config_path, hub_hint
from memwall.integrations.hugging_face.hf_spec import hugging_face_workload
from memwall.integrations.lower_precision import under_autocast
from memwall.integrations.phantom.route import recorded_on_phantom
from memwall.integrations.real_step import real_trace
from memwall.machine.hardware import Hardware
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.roofline import Roofline
from memwall.trace.fake import MOST_MICRO_BATCHES, RecordedRun, record_fake_run
from memwall.trace.records import Route, Trace
from memwall.trace.spec import describe_error, load_workload
from memwall.trace.workload import Workload


class SpecOptions(TypedDict, total=False):
    """Says of a SPEC's training step what a configuration leaves open, and a factory decides itself."""

    batch: int | None
    """Samples in a forward, with a configuration; None is 1."""
    sequence: int | None
    """Tokens in a sample, with a configuration."""
    dtype: str | None
    """Names the dtype for `hugging_face_workload`; None is the configuration's, or float32."""
    optimizer: str | None
    """Names the optimizer for `hugging_face_workload`; None is adamw."""
    autocast: str | None
    """The dtype that the model runs under autocast in, of a configuration or a factory; None for none."""
    lora: str | None
    """Says which adapters are trained, for `hugging_face_workload`; None trains the weights."""
    is_checkpointed: bool
    """Says whether layers are checkpointed by the model itself, for `hugging_face_workload`."""


def workload_of_spec(spec: str | Workload, **options: Unpack[SpecOptions]) -> Workload:
    """Returns the workload that a SPEC names.

    Args:
        spec: `package.module:factory`, `path/file.py:factory`, a Hugging Face model folder, or its config.json; or a
            workload, which is what a factory returns.

    Raises:
        UsageError: the spec can't be used, or a factory is given together with what only a configuration leaves open.
    """
    autocast = options.get("autocast")
    is_checkpointed = options.get("is_checkpointed", False)
    if _is_configuration(spec):
        batch = options.get("batch")
        workload = hugging_face_workload(
            str(spec),
            batch=1 if batch is None else batch,
            sequence=options.get("sequence"),
            dtype=options.get("dtype"),
            optimizer=options.get("optimizer") or "adamw",
            is_checkpointed=is_checkpointed,
            lora=options.get("lora"),
        )
        return workload if autocast is None else under_autocast(workload, autocast)
    if isinstance(spec, str) and ":" not in spec and not Path(spec).suffix == ".py":
        raise UsageError(
            f"'{spec}' names no workload; expected package.module:factory, path/file.py:factory, or the folder or "
            f"config.json of a Hugging Face model on this disk{hub_hint(spec)}"
        )
    names = {"--batch": "batch", "--seq": "sequence", "--dtype": "dtype", "--optimizer": "optimizer"}
    names |= {"--lora": "lora"}
    unused = [option for option, name in names.items() if options.get(name) is not None]
    unused += ["--checkpointing"] if is_checkpointed else []
    if unused:
        raise UsageError(
            f"{', '.join(unused)}: {_shown(spec)} is a factory, which decides that itself; leave it out, or give a "
            "Hugging Face config.json"
        )
    workload = load_workload(spec) if isinstance(spec, str) else spec
    return workload if autocast is None else under_autocast(workload, autocast)


def workloads_of_spec(
    spec: str | Workload, eval_batch: int | None, **options: Unpack[SpecOptions]
) -> tuple[Workload, Workload]:
    """Returns what is trained and what is evaluated, of a batch of its own if `eval_batch` says so.

    Raises:
        UsageError: the spec can't be used, or a factory is told a batch.
    """
    workload = workload_of_spec(spec, **options)
    if eval_batch is None:
        return workload, workload
    if not _is_configuration(spec):
        raise UsageError(f"--eval-batch: {_shown(spec)} is a factory, which decides that itself; leave it out")
    return workload, workload_of_spec(spec, **options | {"batch": eval_batch})


def device_run_of_spec(
    spec: str | Workload,
    hardware: Hardware,
    *,
    mask_share: float | None = None,
    eval_batch: int | None = None,
    is_evaluated: bool = True,
    num_micro_batches: int = 1,
    host_bytes: int = 0,
    changed: Callable[[Workload], Workload] | None = None,
    route: Route = "translate",
    **options: Unpack[SpecOptions],
) -> RecordedRun:
    """Records two steps of a SPEC and an evaluation after them, as a device would run them.

    Args:
        eval_batch: samples that are evaluated at once, with a configuration; None takes the batch of training.
        is_evaluated: whether there is an evaluation after the steps.
        num_micro_batches: forwards and backwards in each step.
        host_bytes: host memory that saved tensors may move to; 0 for none.
        changed: what is recorded in place of the SPEC's own workload.
        route: "phantom" has torch's CUDA build run the step on a phantom device, in a process of its own.

    Where the step needs values that fake tensors don't have, a real one is recorded on this CPU, if it has the room.

    Raises:
        UsageError: the spec or an option can't be used.
        TraceError: the step can't be recorded without data.
    """
    if route == "phantom":
        if not isinstance(spec, str):
            raise UsageError(
                "route phantom: a process of its own makes the workload; give package.module:factory or "
                "path/file.py:factory in place of the Workload"
            )
        run = recorded_on_phantom(
            spec,
            hardware,
            eval_batch=eval_batch,
            num_micro_batches=num_micro_batches,
            mask_share=mask_share,
            options={**options},
        )
        return _translated(run, partial(translated, hardware=hardware), host_bytes)
    workload, evaluated = workloads_of_spec(spec, eval_batch, **options)
    if changed is not None:
        workload = changed(workload)
    recording = recording_for(hardware)
    with _failing_as_trace_error(spec):
        try:
            run = record_fake_run(
                workload,
                evaluated.make_batch if is_evaluated else None,
                num_micro_batches=num_micro_batches,
                seconds_of=Roofline(hardware),
                mask_share=mask_share,
                workspaces=recording.workspaces,
                choices=recording.choices(),
            )
        except NeedsValuesError as failure:
            if recording.autocast != "none":  # a CPU's autocast casts otherwise, and translation does not know how
                raise
            real = real_trace(
                workload,
                hardware,
                failure,
                num_micro_batches=min(num_micro_batches, MOST_MICRO_BATCHES),
                host_bytes=host_bytes,
            )
            return RecordedRun(training=real, evaluation=None, failure=f"not on fake tensors: {failure}")
    return _translated(run, partial(translated, hardware=hardware, autocast=recording.autocast), host_bytes)


def _translated(run: RecordedRun, translate: Callable[..., Trace], host_bytes: int) -> RecordedRun:
    return RecordedRun(
        training=translate(run.training, host_bytes=host_bytes),
        evaluation=None if run.evaluation is None else translate(run.evaluation),
        failure=run.failure,
    )


def _is_configuration(spec: str | Workload) -> bool:
    return isinstance(spec, str) and config_path(spec) is not None


def _shown(spec: str | Workload) -> str:
    return f"'{spec}'" if isinstance(spec, str) else "the workload"


@contextmanager
def _failing_as_trace_error(spec: str | Workload) -> Iterator[None]:
    """Turns whatever a model's own code raises into one error that names the spec."""
    try:
        yield
    except MemwallError:
        raise
    except Exception as error:
        raise TraceError(f"{_shown(spec)}: a step on fake tensors failed: {describe_error(error)}") from error
