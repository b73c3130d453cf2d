"""The host memory of a device's run: read in the sources of torch, transformers and accelerate.

Nothing of it was measured beside a device. What the process itself takes is a published range, like the context.
"""

from collections.abc import Iterable

from msgspec import Struct

from memwall.trace.records import Step, Storage

# Resident bytes of a process with torch 2.2 for CUDA 11.8, kernels loaded lazily, after its first tensor on a 3090,
# without and with torch._C._cuda_getDeviceCount() before: https://github.com/pytorch/pytorch/issues/113326.
_PROCESS_BYTES = (438_632 << 10, 2_056_600 << 10)
# What save_pretrained puts into one file: transformers/modeling_utils.py (5.23), `max_shard_size`.
_SHARD_BYTES = 50 * 10**9


class HostBytes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes in host memory, by what they are for. All from sources, none measured."""

    process_bytes: tuple[int, int]
    """Python, torch and CUDA's libraries: published range; the forecast counts the low end."""
    weights_bytes: int
    """Parameters and buffers, while the model is built or read."""
    shard_bytes: int
    """Those of them that are saved or read at once, in one file."""
    state_bytes: int
    """Optimizer state, while it is read."""
    largest_state_bytes: int
    """Its largest tensor."""
    pinned_bytes: int
    """Page-locked copy of the batch that is moved to the device next."""
    loader_bytes: int
    """The batch that is collated meanwhile."""

    @property
    def build_peak_bytes(self) -> int:
        """While the model is made or read, before it moves to the device.

        Source: transformers/modeling_utils.py, `_load_pretrained_model`: without a device map tensors are views of the
        mapped file, or copies of them in another dtype, one after the other.
        """
        return self.process_bytes[0] + self.weights_bytes

    @property
    def step_peak_bytes(self) -> int:
        """While steps run and batches are loaded in the process itself (dataloader_num_workers=0).

        Source: accelerate/data_loader.py, `DataLoaderShard.__iter__`: one batch ahead; torch/utils/data/dataloader.py,
        `_SingleProcessDataLoaderIter._next_data`: collated, then copied to pinned memory, which the Trainer asks for.
        """
        return self.process_bytes[0] + self.pinned_bytes + self.loader_bytes

    @property
    def save_peak_bytes(self) -> int:
        """While a checkpoint is written: weights first, the optimizer's state after them.

        Source: safetensors/torch.py (0.8), `save_file`: `_flatten_as_ptr` copies every tensor of a file to the host and
        keeps it until all are written; torch/serialization.py, `_save`: one storage after the other.
        """
        return self.step_peak_bytes + max(self.shard_bytes, self.largest_state_bytes)

    @property
    def resume_peak_bytes(self) -> int:
        """While a checkpoint is read: weights, which are let go, then the optimizer's state.

        Source: transformers/trainer.py, `_load_from_checkpoint`, and `_load_optimizer_and_scheduler`, where one process
        reads the whole state with map_location="cpu"; torch/optim/optimizer.py, `load_state_dict`, copies it over.
        """
        return self.process_bytes[0] + max(self.shard_bytes, self.state_bytes)


def host_bytes_of(step: Step) -> HostBytes:
    """Returns what the run of a translated steady step holds in host memory."""
    weights = _bytes_of(_on_device(step, "parameter", "buffer"))
    state = [storage.nbytes for storage in _on_device(step, "optimizer_state")]
    inputs = batch_storages(step)
    return HostBytes(
        process_bytes=_PROCESS_BYTES,
        weights_bytes=weights,
        shard_bytes=min(weights, _SHARD_BYTES),
        state_bytes=sum(state),
        largest_state_bytes=max(state, default=0),
        pinned_bytes=sum(_pinned_bytes(storage.nbytes) for storage in inputs),
        loader_bytes=_bytes_of(inputs),
    )


def batch_storages(step: Step) -> list[Storage]:
    """The batch on the device: what stands before the step and its forward or loss reads; optimizers read constants."""
    read = {index for op in step.ops if op.phase != "optimizer" for index in op.inputs}
    return [
        storage
        for index, storage in enumerate(step.storages)
        if storage.category == "input" and index in read and storage.device_type == "cuda"
    ]


def _on_device(step: Step, *categories: str) -> list[Storage]:
    """Tells what is there before the step begins."""
    return [
        storage
        for storage in step.storages
        if storage.birth < 0 and storage.category in categories and storage.device_type == "cuda"
    ]


def _bytes_of(storages: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _pinned_bytes(num_bytes: int) -> int:
    """A block of page-locked memory is a power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h (2.13), `allocate`.
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0
