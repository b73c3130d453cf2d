"""Bytes of the buffers that DeepSpeed makes for a configuration of ZeRO, each with the key that sets it.

Keys and defaults: DeepSpeed 0.19, runtime/zero/config.py and offload_config.py; what becomes of them: stage_1_and_2.py
(`reduce_bucket_size`, a second bucket with `overlap_comm`), stage3.py (a bucket for the whole run), and
swap_tensor/partitioned_param_swapper.py (`buffer_count` x `buffer_size`).
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from memwall.errors import UsageError

_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "buffer_count": 5,
    "buffer_size": 100_000_000,
}
_STATE_BUFFERS = 4
_COMMUNICATION_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class DeepSpeedBuffer(Struct, frozen=True, kw_only=True):
    """Says what a key of a configuration costs in each rank."""

    key: str
    value: str
    """As the configuration has it, or DeepSpeed's default, which is said."""
    nbytes: int | None
    """None where others fill the value in, which says "auto"."""
    where: str
    """Device or host."""
    when: str
    """Part of a run for which it stands, and whether it is a bound."""


def buffers_in(path: Path) -> tuple[DeepSpeedBuffer, ...]:
    """Returns the buffers of a configuration in a file, in the order in which a run makes them; () without ZeRO.

    Raises:
        UsageError: the file cannot be read, is no JSON object, or has a value that DeepSpeed would not take.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; expected a DeepSpeed configuration in JSON") from error
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(zero, dict):
        raise UsageError(f"{path} has no section zero_optimization; expected a DeepSpeed configuration")
    return tuple(_buffers(path, config, zero))


def _buffers(path: Path, config: dict[str, Any], zero: dict[str, Any]) -> list[DeepSpeedBuffer]:
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UsageError(f"{path}: zero_optimization.stage is {stage!r}; expected 0, 1, 2 or 3")
    if stage == 0:
        return []
    compute_bytes = 2 if _is_on(config, "bf16") or _is_on(config, "fp16") else 4
    sent_bytes = _COMMUNICATION_BYTES.get(str(config.get("communication_data_type")), compute_bytes)
    overlaps = zero.get("overlap_comm")
    has_second = overlaps is True and stage < 3
    found = []
    if zero.get("contiguous_gradients", True):
        found.append(
            _buffer(
                path,
                zero,
                "reduce_bucket_size",
                sent_bytes * (2 if has_second else 1),
                when="for the whole run" if stage == 3 else "in each backward",
                also=", two of them for overlap_comm" if has_second else "",
            )
        )
    if stage < 3:
        found.append(_buffer(path, zero, "allgather_bucket_size", compute_bytes, when="after each step, at most"))
        return found
    found.append(_buffer(path, zero, "stage3_prefetch_bucket_size", compute_bytes, when="fetched ahead, at most"))
    live = "gathered at once, at most but for the module that runs"
    found.append(_buffer(path, zero, "stage3_max_live_parameters", compute_bytes, when=live))
    parameters, state = zero.get("offload_param"), zero.get("offload_optimizer")
    if isinstance(parameters, dict) and parameters.get("device") == "nvme":
        found.append(_parameter_buffers(path, parameters, compute_bytes))
    if isinstance(state, dict) and state.get("device") == "nvme":
        found.append(
            DeepSpeedBuffer(
                key="zero_optimization.offload_optimizer.buffer_count",
                value=f"{state.get('buffer_count', _STATE_BUFFERS)} of the largest sub_group_size that is stepped",
                nbytes=None,
                where="host",
                when="for the whole run, locked in memory",
            )
        )
    return found


def _parameter_buffers(path: Path, section: dict[str, Any], element_bytes: int) -> DeepSpeedBuffer:
    count = _number(path, section, "buffer_count")
    when, said = "for the whole run, locked in memory", f", buffer_count {'auto' if count is None else count}"
    one = _buffer(path, section, "buffer_size", element_bytes * (count or 0), when=when, where="host", also=said)
    one = replace(one, key=one.key.replace("buffer_size", "offload_param.buffer_size"))
    return one if count is not None else replace(one, nbytes=None)


def _buffer(
    path: Path,
    section_values: dict[str, Any],
    key: str,
    element_bytes: int,
    *,
    when: str,
    where: str = "device",
    also: str = "",
) -> DeepSpeedBuffer:
    elements = _number(path, section_values, key)
    said = f"{elements:,} elements" if elements is not None else "auto"
    default = "" if key in section_values else ", DeepSpeed's default"
    return DeepSpeedBuffer(
        key=f"zero_optimization.{key}",
        value=f"{said}{default}{also}",
        nbytes=None if elements is None else elements * element_bytes,
        where=where,
        when=when,
    )


def _number(path: Path, values: dict[str, Any], key: str) -> int | None:
    """Returns a number of a section, or DeepSpeed's own; None for "auto"."""
    value = values.get(key, _DEFAULTS[key])
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 62:
        raise UsageError(f'{path}: {key} is {value!r}; expected a number of elements, or "auto"')
    return int(value)


def _is_on(config: dict[str, Any], precision: str) -> bool:
    section = config.get(precision)
    return isinstance(section, dict) and section.get("enabled") in (True, "auto")
