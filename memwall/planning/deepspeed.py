"""A plan as a DeepSpeed configuration: numbers only, for which DeepSpeed need not be installed.

Keys and their meaning: DeepSpeed 0.19.8, `config.py`, `zero/config.py`, `zero/offload_config.py` and `swap_tensor/` in
`runtime/`; "auto" is Hugging Face's: transformers 5.23.0, `integrations/deepspeed.py`. What runs with such a
configuration is in `memwall.integrations`.
"""

import os
import uuid
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from memwall.errors import IntegrationError
from memwall.machine.disk_location import check_directory, default_directory
from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.technique import DeepSpeedPart, technique_of
from memwall.predict.sharding.zero import DeepSpeedZero
from memwall.trace.optimizers import ELEMENTWISE
from memwall.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

Place = Literal["none", "cpu", "nvme"]

HUGGING_FACE_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""The Trainer fills these in from its own arguments, besides precision, optimizer and what depends on the width."""

SWAPPED_MIN_BYTES = 1 << 20
"""DeepSpeed leaves smaller pieces in memory whatever the configuration says (`MIN_AIO_BYTES`)."""

_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
_ALIGNED_ELEMENTS = 1024  # a multiple of AIO_ALIGNED_BYTES for every dtype
_ADAM_STATE_BYTES = 8  # two moments in float32 for each parameter's element
_SWAP_BYTES = 16  # on disk for each element: master weight, gradient, two moments, all float32
_SPACE_SHARE = 1.1
_PERSISTENT_ELEMENTS = 100_000
_BUCKET_ELEMENTS = 50_000_000
_MIN_BUCKET_ELEMENTS = 500_000
_UNSPLIT_ELEMENTS = 1_000_000_000


class _Sizes(Struct, frozen=True, kw_only=True):
    """Holds the sizes that buffers follow from; elements of one rank's share where "share" is in the name."""

    num_elements: int
    largest_elements: int
    largest_share_elements: int
    element_bytes: int
    most_swapped_in_module: int
    """Parameters of one module that are large enough to be swapped: they are in memory together."""


def not_expressed(plan: Plan) -> tuple[Action, ...]:
    """Returns the plan's actions that DeepSpeed has nothing for: memwall must still apply them, DeepSpeed or not."""
    return tuple(action for action in plan.actions if technique_of(action).deepspeed(action) is None)


def deepspeed_config(
    plan: Plan,
    *,
    world_size: int | None = None,
    model: "nn.Module | None" = None,
    optimizer: "torch.optim.Optimizer | None" = None,
    stage: int | None = None,
    offload_parameters: Place = "none",
    gradient_clipping: float = 0.0,
    disk: str | None = None,
    for_hugging_face: bool = False,
) -> dict[str, Any]:
    """Returns the configuration under which DeepSpeed does its part of a plan.

    Args:
        world_size: ranks that train, each with the plan's batch; by default the plan's, torchrun's WORLD_SIZE, or 1.
        model: the model, on the meta device if need be, as it is before `zero.Init` or `initialize`: for the sizes of
            buffers. Needed to keep parameters on NVMe.
        optimizer: the one that DeepSpeed will be given; checked to be one that may be run on flat pieces.
        stage: of ZeRO; by default the one that a plan for ranks chose, or the lowest that does what is asked for: 3 for
            NVMe and for parameters elsewhere, 2 for several ranks or state in host memory, 1 for lower
            precision, which needs its master weights, else 0.
        offload_parameters: where parameters are between their uses.
        gradient_clipping: norm to clip at, 0 for none; DeepSpeed clips, the loop must not.
        disk: folder on a disk for what goes to NVMe; a new one is named in it, as two runs in one would overwrite
            each other. By default the system's temporary directory.
        for_hugging_face: "auto" for all that Trainer and Accelerate fill in from their own arguments.

    Raises:
        IntegrationError: the stage cannot do it, the optimizer is none for flat pieces, the batch is unknown, or
            sizes are needed and there is no model.
        StoreError: the disk has not the space, or is none.
    """
    planned = plan.forecast.ranks
    zero_of_plan = planned.chosen if planned is not None and isinstance(planned.chosen, DeepSpeedZero) else None
    if planned is not None and zero_of_plan is not None:
        stage = zero_of_plan.stage if stage is None else stage
        world_size = planned.network.num_ranks if world_size is None else world_size
        offload_parameters = "cpu" if zero_of_plan.offloads_parameters else offload_parameters
    ranks = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 1:
        raise IntegrationError(f"world_size is {ranks}; expected the number of ranks that train, 1 or more")
    parts = _parts(plan)
    placement = next((part for part in parts if part.state_tier is not None), None)
    state = _state_place(placement, zero_of_plan)
    dtype = next((part.dtype for part in parts if part.dtype), None)
    chosen = _stage(stage, state, offload_parameters, ranks, is_lower=dtype is not None)
    is_untested = _check_optimizer(optimizer)
    sizes = None if model is None else _sizes(model, ranks, is_lower=dtype is not None)
    uses_disk = "nvme" in (state, offload_parameters)
    folder = _folder(disk, sizes, state, offload_parameters) if uses_disk else None
    has_streams = plan.forecast.device != "cpu"
    zero: dict[str, Any] = {
        "stage": chosen,
        "contiguous_gradients": True,
        "overlap_comm": has_streams,
        "reduce_scatter": True,
        **_buckets(sizes, for_hugging_face),
    }
    if state != "none":
        zero["offload_optimizer"] = _state_section(state, folder, optimizer, has_streams)
    if chosen == 3:
        zero |= _stage_3(sizes, placement, offload_parameters, for_hugging_face)
        if offload_parameters != "none":
            zero["offload_param"] = _parameter_section(offload_parameters, folder, sizes, has_streams)
    config: dict[str, Any] = {
        **_batch(plan, ranks, for_hugging_face),
        "gradient_clipping": "auto" if for_hugging_face else gradient_clipping,
        **_precision(dtype, for_hugging_face),
        # The plan is for the optimizer of the loop, in place of which DeepSpeed would ask for one of its own.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": is_untested,
        "zero_optimization": zero,
    }
    if uses_disk:
        config["aio"] = dict(_AIO)
    return config


def remarks(plan: Plan, config: dict[str, Any]) -> tuple[str, ...]:
    """Returns where DeepSpeed does its part otherwise than the plan says: to be shown with the configuration."""
    zero = config["zero_optimization"]
    found = []
    for part in _parts(plan):
        if part.remark:
            found.append(part.remark)
        if part.resident_bytes and zero.get("offload_optimizer"):
            found.append(
                f"of the optimizer's state the plan keeps {format_bytes(part.resident_bytes)} in memory; DeepSpeed "
                "moves all of it"
            )
    buffers_bytes = _parameter_buffer_bytes(zero, config)
    if buffers_bytes:
        found.append(f"DeepSpeed holds {format_bytes(buffers_bytes)} of buffers for parameters, locked in memory")
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        found.append(
            "DeepSpeed's load_checkpoint loses the moments of an optimizer on NVMe and says nothing: a run that is to "
            'be resumed has offload_optimizer.device "cpu"'
        )
    if zero["stage"] > 0:
        peak_text = format_bytes(plan.forecast.peak.process_bytes)
        found.append(f"the forecast of {peak_text} is for one process without DeepSpeed; ZeRO {zero['stage']} differs")
    return tuple(found)


def _state_place(placement: DeepSpeedPart | None, zero: DeepSpeedZero | None) -> Place:
    """Returns where the optimizer's state is: by the plan for ranks, else by the action that moves it."""
    if zero is not None and zero.offloads_state:
        return "cpu"
    if placement is None:
        return "none"
    return "nvme" if placement.state_tier == "disk" else "cpu"


def _stage(asked: int | None, state: Place, parameters: Place, ranks: int, *, is_lower: bool) -> int:
    needs_3 = "nvme" in (state, parameters) or parameters != "none"
    least = 3 if needs_3 else 2 if state != "none" else 1 if is_lower else 0
    if asked is None:
        return max(least, 2) if ranks > 1 else least
    if asked not in (0, 1, 2, 3):
        raise IntegrationError(f"ZeRO has no stage {asked}; expected 0, 1, 2 or 3")
    if asked >= least or (state == "cpu" and asked == 1 and not needs_3):
        return asked
    what = "the optimizer's state on NVMe" if state == "nvme" else f"parameters on {parameters}"
    if not needs_3:
        what = "the optimizer's state in host memory" if state != "none" else "lower precision with master weights"
    raise IntegrationError(
        f"ZeRO stage {asked} cannot have {what}, which the plan or offload_parameters asks for; leave the stage out, "
        f"or give {least} or higher"
    )


def _check_optimizer(optimizer: "torch.optim.Optimizer | None") -> bool:
    """Tells whether DeepSpeed may run an optimizer that it does not list itself."""
    if optimizer is None:
        return False
    name = type(optimizer).__name__
    if name not in ELEMENTWISE:
        raise IntegrationError(
            f"the optimizer is {name}, and DeepSpeed steps flat pieces of parameters, in which a parameter's shape and "
            f"norm are lost; take one that treats each element alone ({', '.join(sorted(ELEMENTWISE))})"
        )
    return True


def _sizes(model: "nn.Module", ranks: int, *, is_lower: bool) -> _Sizes:
    from torch import nn

    parameters = nn.Module.parameters  # some classes have a `parameters` of their own
    counts = {id(p): p.numel() for p in parameters(model) if p.numel()}
    if not counts:
        raise IntegrationError(
            f"{type(model).__name__} has no parameters with elements, so there is nothing to size buffers by; give the "
            'model as it is before deepspeed.zero.Init partitions it, made under torch.device("meta") if it is large'
        )
    largest = max(counts.values())
    element_bytes = 2 if is_lower else max(p.element_size() for p in parameters(model))
    most = max(
        sum(-(-p.numel() // ranks) * element_bytes >= SWAPPED_MIN_BYTES for p in parameters(module, recurse=False))
        for module in model.modules()
    )
    return _Sizes(
        num_elements=sum(counts.values()),
        largest_elements=largest,
        largest_share_elements=-(-largest // ranks),
        element_bytes=element_bytes,
        most_swapped_in_module=most,
    )


def _folder(disk: str | None, sizes: _Sizes | None, state: Place, parameters: Place) -> str:
    """Names a new folder for the swap files of all ranks, in one that was checked to have the space."""
    needed_bytes = 0
    if sizes is not None:
        each = (_SWAP_BYTES if state == "nvme" else 0) + (sizes.element_bytes if parameters == "nvme" else 0)
        needed_bytes = int(sizes.num_elements * each * _SPACE_SHARE)
    directory = disk if disk is not None else default_directory()
    check_directory(directory, needed_bytes)
    return os.path.join(os.path.abspath(directory), f"memwall-deepspeed-{uuid.uuid4().hex[:12]}")


def _batch(plan: Plan, ranks: int, for_hugging_face: bool) -> dict[str, Any]:
    if for_hugging_face:
        return dict.fromkeys(HUGGING_FACE_KEYS[:3], "auto")
    micro, parts = plan.batch_parts
    if micro < 1 or parts < 1:
        raise IntegrationError(
            "the plan does not know its batch (the recorded inputs had no common first dimension), and DeepSpeed must "
            "have it; set train_micro_batch_size_per_gpu, gradient_accumulation_steps and train_batch_size yourself, "
            "or take for_hugging_face=True, where the Trainer fills them in"
        )
    return dict(zip(HUGGING_FACE_KEYS[:3], (micro * parts * ranks, micro, parts), strict=True))


def _parts(plan: Plan) -> list[DeepSpeedPart]:
    found = (technique_of(action).deepspeed(action) for action in plan.actions)
    return [part for part in found if part is not None]


def _precision(dtype: str | None, for_hugging_face: bool) -> dict[str, Any]:
    if for_hugging_face:
        return {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    fp16: dict[str, Any] = {"enabled": dtype == "float16"}
    if dtype == "float16":
        fp16 |= {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1}
    return {"bf16": {"enabled": dtype == "bfloat16"}, "fp16": fp16}


def _buckets(sizes: _Sizes | None, for_hugging_face: bool) -> dict[str, Any]:
    """Returns elements reduced at a time. DeepSpeed's own 5e8 take 2 GB, which ZeRO-3 holds all the time."""
    elements = _BUCKET_ELEMENTS if sizes is None else max(sizes.largest_elements, _MIN_BUCKET_ELEMENTS)
    return {"reduce_bucket_size": "auto" if for_hugging_face else elements, "allgather_bucket_size": elements}


def _state_section(
    state: Place, folder: str | None, optimizer: "torch.optim.Optimizer | None", has_streams: bool
) -> dict[str, Any]:
    section: dict[str, Any] = {"device": state, "pin_memory": has_streams, "ratio": 1.0}
    if state == "nvme":
        has_third = optimizer is not None and any(group.get("amsgrad") for group in optimizer.param_groups)
        # Weight, gradient and two moments; a third tensor of state would find no buffer.
        section |= {"nvme_path": folder, "buffer_count": 5 if has_third else 4, "fast_init": False}
        section |= {"pipeline_read": False, "pipeline_write": False}
    return section


def _stage_3(
    sizes: _Sizes | None, placement: DeepSpeedPart | None, parameters: Place, for_hugging_face: bool
) -> dict[str, Any]:
    prefetch = _BUCKET_ELEMENTS if sizes is None else sizes.largest_elements
    live, reuse = _UNSPLIT_ELEMENTS, _UNSPLIT_ELEMENTS
    if parameters == "nvme" and sizes is not None:
        # A parameter that stays for its next use keeps its buffer, and the next one finds none: DeepSpeed ends with
        # "Not enough buffers 0 for swapping 1".
        live, reuse = _buffer_count(sizes) * _buffer_elements(sizes), 0
    return {
        # A tile of the step, in elements of one rank: what the plan steps at a time.
        "sub_group_size": (
            _UNSPLIT_ELEMENTS if placement is None else max(1, placement.bucket_bytes // _ADAM_STATE_BYTES)
        ),
        "stage3_prefetch_bucket_size": "auto" if for_hugging_face else prefetch,
        "stage3_param_persistence_threshold": "auto" if for_hugging_face else _PERSISTENT_ELEMENTS,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


def _parameter_section(
    parameters: Place, folder: str | None, sizes: _Sizes | None, has_streams: bool
) -> dict[str, Any]:
    section: dict[str, Any] = {"device": parameters, "pin_memory": has_streams}
    if parameters == "nvme":
        if sizes is None:
            raise IntegrationError(
                "offload_parameters='nvme' needs buffers that hold the largest parameter; give model=..., "
                'made under torch.device("meta") if it is large'
            )
        section |= {
            "nvme_path": folder,
            "buffer_count": _buffer_count(sizes),
            "buffer_size": _buffer_elements(sizes),
            "max_in_cpu": 0,
        }
    return section


def _buffer_elements(sizes: _Sizes) -> int:
    return -(-sizes.largest_share_elements // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS


def _buffer_count(sizes: _Sizes) -> int:
    """Counts those of a module in use, as many that are read ahead, and one that is being released."""
    return max(5, 2 * sizes.most_swapped_in_module + 1)


def _parameter_buffer_bytes(zero: dict[str, Any], config: dict[str, Any]) -> int:
    section = zero.get("offload_param", {})
    is_lower = any(config[name]["enabled"] is True for name in ("bf16", "fp16"))
    return int(section.get("buffer_count", 0) * section.get("buffer_size", 0) * (2 if is_lower else 4))
