"""CUDA snapshots written by hand, in the format of `torch.cuda.memory._snapshot()`.

Keys and their order as THCPModule_memorySnapshot writes them (torch/csrc/cuda/Module.cpp); meanings in the docstring of
`torch.cuda.memory._snapshot`. The sizes of blocks are given by the test, so that what is derived can be compared.
"""

from typing import Any

MIB = 1 << 20
BASE = 0x7F0000000000


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


class History:
    """Device 0's allocator as a test drives it: events so far, and the truth after each of them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.segments: dict[int, dict[str, Any]] = {}
        self.used: dict[int, dict[str, Any]] = {}
        self.truth: list[tuple[int, int, int]] = [(0, 0, 0)]
        """Allocated, active and reserved bytes before the first event and after each."""
        self.num_forgotten = 0

    def segment(self, offset: int, size: int, kind: str = "large", *, is_expandable: bool = False) -> None:
        address = BASE + offset
        self._note("segment_map" if is_expandable else "segment_alloc", address, size)
        for start, held in list(self.segments.items()):
            if is_expandable and held["is_expandable"] and start + held["total_size"] == address:
                held["total_size"] += size
                break
        else:
            self.segments[address] = {"total_size": size, "segment_type": kind, "is_expandable": is_expandable}
        self._settle()

    def release(self, offset: int, size: int | None = None) -> None:
        """Gives a classic segment back, or the end of an expandable one."""
        address = BASE + offset
        if size is None:
            size = self.segments.pop(address)["total_size"]
            self._note("segment_free", address, size)
        else:
            self._note("segment_unmap", address, size)
            for start, held in self.segments.items():
                if start < address < start + held["total_size"]:
                    held["total_size"] -= size
        self._settle()

    def alloc(self, offset: int, requested: int, size: int, frames: Any = (), category: str = "") -> None:
        address = BASE + offset
        event = self._note("alloc", address, requested, frames)
        if category:
            event["category"] = category
        self.used[address] = {"size": size, "requested": requested, "frames": list(frames), "is_pending": False}
        self._settle()

    def request_free(self, offset: int) -> None:
        block = self.used[BASE + offset]
        block["is_pending"] = True
        self._note("free_requested", BASE + offset, block["requested"])
        self._settle()

    def complete_free(self, offset: int) -> None:
        block = self.used.pop(BASE + offset)
        self._note("free_completed", BASE + offset, block["requested"])
        self._settle()

    def free(self, offset: int) -> None:
        self.request_free(offset)
        self.complete_free(offset)

    def oom(self, size: int, device_free: int) -> None:
        event = self._note("oom", 0, size)
        del event["addr"]
        event["device_free"] = device_free
        self._settle()

    def forget(self) -> None:
        """Loses the events so far, as a full ring buffer does, or a recording that is begun late."""
        self.num_forgotten += len(self.events)
        self.events.clear()
        del self.truth[:-1]
        for block in self.used.values():
            block["frames"] = []

    def snapshot(self) -> dict[str, Any]:
        return {
            "segments": [self._segment(address) for address in sorted(self.segments)],
            "device_traces": [self.events],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": False,
                "pinned_num_register_threads": 1,
                "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {"1": 0, "2": 0},
            },
            "external_annotations": [],
        }

    def _note(self, action: str, address: int, size: int, frames: Any = ()) -> dict[str, Any]:
        event: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": 0}
        event["time_us"] = 1_700_000_000_000_000 + 10 * (self.num_forgotten + len(self.events))
        event["compile_context"] = "N/A"
        event["user_metadata"] = ""
        event["pool_id"] = (0, 0)
        event["frames"] = list(frames)
        self.events.append(event)
        return event

    def _settle(self) -> None:
        active = sum(block["size"] for block in self.used.values())
        pending = sum(block["size"] for block in self.used.values() if block["is_pending"])
        reserved = sum(held["total_size"] for held in self.segments.values())
        self.truth.append((active - pending, active, reserved))

    def _segment(self, address: int) -> dict[str, Any]:
        held = self.segments[address]
        end = address + held["total_size"]
        blocks: list[dict[str, Any]] = []
        position = address
        inside = sorted(start for start in self.used if address <= start < end)
        for start in [*inside, end]:
            if start > position:
                blocks.append(_block(position, start - position, 0, "inactive", []))
            if start < end:
                used = self.used[start]
                state = "active_pending_free" if used["is_pending"] else "active_allocated"
                blocks.append(_block(start, used["size"], used["requested"], state, used["frames"]))
                position = start + used["size"]
        active = sum(block["size"] for block in blocks if block["state"] != "inactive")
        allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        return {
            "device": 0,
            "address": address,
            "total_size": held["total_size"],
            "allocated_size": allocated,
            "active_size": active,
            "requested_size": sum(block["requested_size"] for block in blocks if block["state"] != "inactive"),
            "stream": 0,
            "segment_type": held["segment_type"],
            "segment_pool_id": (0, 0),
            "is_expandable": held["is_expandable"],
            "frames": [],
            "blocks": blocks,
        }


def _block(address: int, size: int, requested: int, state: str, frames: list[Any]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
