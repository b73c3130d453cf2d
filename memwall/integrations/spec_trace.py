"""From a SPEC to a trace without a device: a Workload's factory or a Hugging Face configuration."""

from collections.abc import Collection
from pathlib import Path

from memwall.errors import MemwallError, TraceError, UsageError
from memwall.integrations.hf_config import config_path
from memwall.integrations.hf_spec import hugging_face_workload
from memwall.predict.hardware import Hardware
from memwall.predict.roofline import Roofline
from memwall.predict.translate import recording_for, translated
from memwall.trace.fake import record_fake
from memwall.trace.records import Trace
from memwall.trace.spec import describe_error, load_workload
from memwall.trace.workload import Workload

__all__ = ["device_trace_of_spec", "workload_of_spec"]


def workload_of_spec(
    spec: str,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
) -> Workload:
    """The workload that a SPEC names.

    Args:
        spec: `package.module:factory`, `path/file.py:factory`, a Hugging Face model folder, or its config.json.
        batch: samples, with a configuration; None is 1. sequence: tokens per sample, with a configuration.
        dtype, optimizer: see `hugging_face_workload`; None is float32 and adamw.

    Raises:
        UsageError: the spec can't be used, or a factory is given together with what only a configuration leaves open.
    """
    if config_path(spec) is not None:
        return hugging_face_workload(
            spec,
            batch=1 if batch is None else batch,
            sequence=sequence,
            dtype=dtype or "float32",
            optimizer=optimizer or "adamw",
        )
    if ":" not in spec and not Path(spec).suffix == ".py":
        raise UsageError(
            f"'{spec}' names no workload; expected package.module:factory, path/file.py:factory, or the folder or "
            "config.json of a Hugging Face model on this disk"
        )
    given = {"--batch": batch, "--seq": sequence, "--dtype": dtype, "--optimizer": optimizer}
    unused = [option for option, value in given.items() if value is not None]
    if unused:
        raise UsageError(
            f"{', '.join(unused)}: '{spec}' is a factory, which decides that itself; leave it out, or give a Hugging "
            "Face config.json"
        )
    return load_workload(spec)


def device_trace_of_spec(
    spec: str,
    hardware: Hardware,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    mask_share: float | None = None,
    host_bytes: int = 0,
    without: Collection[str] = (),
) -> Trace:
    """Two steps of a SPEC as a device would run them, with the least seconds that they can take there.

    Args:
        host_bytes: host memory that saved tensors may move to; 0 for none.
        without: names of rules of `memwall.predict.translate` to leave out.

    Raises:
        UsageError: the spec, an option or a rule can't be used.
        TraceError: the step can't be recorded without data.
    """
    workload = workload_of_spec(spec, batch=batch, sequence=sequence, dtype=dtype, optimizer=optimizer)
    recording = recording_for(hardware, without=without)
    try:
        trace = record_fake(
            workload,
            target="cpu" if "foreach-optimizer" in without else "cuda",
            seconds_of=Roofline(hardware),
            mask_share=mask_share,
            workspaces=recording.workspaces,
            choices=recording.choices(),
        )
    except MemwallError:
        raise
    except Exception as error:  # whatever a model's own code raises
        raise TraceError(f"'{spec}': a step on fake tensors failed: {describe_error(error)}") from error
    return translated(trace, hardware, autocast=recording.autocast, host_bytes=host_bytes, without=without)
