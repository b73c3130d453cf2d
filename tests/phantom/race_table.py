"""Faults of stream code as data: a wait that is missing, an event of the wrong stream, memory given away too early.

Each is a change of one place in the product, and names the program of `stream_programs` that is to notice it.
"""

from typing import NamedTuple

__all__ = ["RACES", "Race"]

TIER = "memwall/store/pinned_tier.py"
PINNED = "memwall/apply/optimizer_state/pinned.py"
RING = "memwall/apply/optimizer_state/ring.py"
BUCKETS = "memwall/store/buckets.py"
CPU_STEP = "memwall/apply/optimizer_state/cpu_step.py"
RESIZED = "memwall/apply/streaming/resized.py"


class Race(NamedTuple):
    """Names a fault, where it is, the text that keeps it away, what stands there with the fault, and who notices.

    `place` is the n-th occurrence of the text in its file, where there are several.
    """

    fault: str
    program: str
    path: str
    text: str
    faulty: str
    place: int = 0


RACES = (
    Race(
        "a saved tensor leaves before it is computed",
        "activations",
        TIER,
        "        self._outward.wait_stream(compute)\n",
        "",
    ),
    Race(
        "a saved tensor comes back into memory that is still read",
        "activations",
        TIER,
        "        self._inward.wait_stream(compute)\n",
        "",
    ),
    Race(
        "backward reads a saved tensor before it is back",
        "activations",
        TIER,
        "torch.cuda.current_stream(self._device).wait_event(load.ready)",
        "pass",
    ),
    Race(
        "the memory of a load in vain is given away before the copy into it",
        "activations",
        TIER,
        "torch.cuda.current_stream(self._device).wait_event(load.ready)",
        "pass",
        1,
    ),
    Race(
        "the memory of a source is given away before the copy from it",
        "activations",
        TIER,
        "            parked.owner.wait_event(parked.copied)\n",
        "",
    ),
    Race(
        "that a tensor has left is said by the stream that computes",
        "activations",
        TIER,
        "copied = self._outward.record_event()",
        "copied = compute.record_event()",
    ),
    Race(
        "that a tensor is back is said by the stream that computes",
        "activations",
        TIER,
        "ready = self._inward.record_event()",
        "ready = compute.record_event()",
    ),
    Race(
        "that a tensor is back is said by the stream outward",
        "activations",
        TIER,
        "ready = self._inward.record_event()",
        "ready = self._outward.record_event()",
    ),
    Race(
        "that a tensor has left is said before the copy is launched",
        "activations",
        TIER,
        """        with torch.cuda.stream(self._outward):
            host.memory.copy_(tensor, non_blocking=True)
        copied = self._outward.record_event()
""",
        """        copied = self._outward.record_event()
        with torch.cuda.stream(self._outward):
            host.memory.copy_(tensor, non_blocking=True)
""",
    ),
    Race(
        "state comes into memory that is still read",
        "state",
        PINNED,
        "        self._inward.wait_stream(self._compute())\n",
        "",
    ),
    Race(
        "state comes into a buffer before what is in it has left",
        "state",
        PINNED,
        "            self._inward.wait_event(after.done)\n",
        "            pass\n",
    ),
    Race(
        "state leaves before it is computed",
        "state",
        PINNED,
        "        self._outward.wait_stream(self._compute())\n",
        "",
    ),
    Race(
        "nobody waits for state on its way",
        "state",
        PINNED,
        "        torch.cuda.current_stream(self.device).wait_event(self.done)\n",
        "        pass\n",
    ),
    Race(
        "that state is here is said by the stream outward",
        "state",
        PINNED,
        "StreamCopy(self._inward.record_event(), self.device)",
        "StreamCopy(self._outward.record_event(), self.device)",
    ),
    Race(
        "that state has left is said by the stream inward",
        "state",
        PINNED,
        "StreamCopy(self._outward.record_event(), self.device)",
        "StreamCopy(self._inward.record_event(), self.device)",
    ),
    Race(
        "a spent buffer is freed before the copy out of it",
        "state",
        RING,
        "                spent.append(buffer)\n",
        "                pass\n",
    ),
    Race(
        "a step begins before its state is here",
        "state",
        BUCKETS,
        "        self._read.wait()\n        self._read = None\n",
        "        self._read = None\n",
    ),
    Race(
        "a first state is freed before the copy out of it",
        "state",
        BUCKETS,
        "                self.write.wait()\n        else:",
        "                pass\n        else:",
    ),
    Race(
        "a step ends before its state has left",
        "state",
        BUCKETS,
        "            self.write.wait()\n            self.write = None\n",
        "            self.write = None\n",
    ),
    Race(
        "gradients go to the CPU before they are computed",
        "cpu_step",
        CPU_STEP,
        "        self._outward.wait_stream(compute)\n",
        "",
    ),
    Race(
        "the CPU steps before gradients have come",
        "cpu_step",
        CPU_STEP,
        "                here.done.synchronize()\n",
        "",
    ),
    Race(
        "the device goes on before parameters are back",
        "cpu_step",
        CPU_STEP,
        "            compute.wait_stream(self._inward)\n",
        "",
    ),
    Race(
        "a stage is written before what is in it has gone up",
        "cpu_step",
        CPU_STEP,
        "            self._outward.wait_event(stage.up)\n",
        "            pass\n",
    ),
    Race(
        "that gradients have come is said by the stream inward",
        "cpu_step",
        CPU_STEP,
        "down.done = self._outward.record_event()",
        "down.done = self._inward.record_event()",
    ),
    Race(
        "a block computes with parameters that are not back",
        "parameters",
        RESIZED,
        "            self._read.wait()\n",
        "",
    ),
    Race(
        "a gradient's memory is given away before the copy from it",
        "parameters",
        RESIZED,
        "            self._write.wait()\n",
        "",
    ),
)
