"""Writes down one training step at the size of a card: operations, storages, saved tensors and the backward they imply.

The planner benchmark needs traces that never change, of models that no CPU could run. A `Tape` takes the forward of a
model as calls of `run` and derives backward as autograd would run it; times are a roofline of a `CostTable`. What comes
out is an ordinary `memwall.trace.records.Trace`, so that the planner sees what it sees of a recorded step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memwall.machine.tiers import Machine
from memwall.trace.records import Category, Module, ModuleCall, Op, Phase, SavedTensor, Step, Storage, Trace

DEVICE = "cuda"


class CostTable(NamedTuple):
    """A device and its way to the next tier. Speeds are what a training step is taken to reach, not data sheets'."""

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    write_bytes_per_second: float
    """To the next tier; 0 where there is none."""
    read_bytes_per_second: float
    window_bytes: int
    """Device memory for bytes on their way out."""
    launch_seconds: float = 5e-6
    interference: float = 0.1
    """By how much a copy slows what computes beside it: 1.1 to 1.3 times in Galvatron's measurements."""

    @property
    def copy_seconds_per_byte(self) -> float:
        """Computing time that moving a byte out and back costs."""
        if not self.write_bytes_per_second:
            return 0.0
        return self.interference * (1 / self.write_bytes_per_second + 1 / self.read_bytes_per_second)


class Weight(NamedTuple):
    """A parameter as operations name it."""

    storage: int
    nbytes: int
    is_trained: bool


@dataclass
class _Storage:
    nbytes: int
    category: Category
    birth: int
    module: int
    phase: Phase
    last_use: int
    outlives_step: bool = False


@dataclass
class _Save:
    storage: int
    module: int
    packed: int
    unpacked: int = -1
    released: int = -1


@dataclass
class _Call:
    module: int
    start: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    end: int = -1
    backward_start: int = -1
    backward_end: int = -1


@dataclass
class _Node:
    """One autograd node: what its backward reads, and whose gradients it makes."""

    name: str
    module: int
    call: _Call | None
    inputs: tuple[int, ...]
    """Those that need a gradient."""
    output: int
    saves: list[_Save]
    weights: tuple[Weight, ...]
    """Those that are trained."""
    flops: float
    is_alias: bool


@dataclass
class Tape:
    """One training step in the making. Storages are numbers; index 0 of the modules is the root."""

    costs: CostTable
    modules: list[Module] = field(default_factory=lambda: [Module("", "Model", -1, "none", False, False, True, 0)])

    def __post_init__(self) -> None:
        self._names: dict[str, int] = {}
        self._ops: list[Op] = []
        self._storages: list[_Storage] = []
        self._saves: list[_Save] = []
        self._calls: list[_Call] = []
        self._nodes: list[_Node] = []
        self._needs_gradient: set[int] = set()
        self._gradients: dict[int, int] = {}
        self._trained: list[Weight] = []
        self._weight_gradients: list[int] = []
        self._states: list[int] = []
        self._module = 0
        self._call: _Call | None = None
        self._phase: Phase = "forward"

    # -- what there is ---------------------------------------------------------------------------------------------

    def module(
        self, path: str, class_name: str, parent: int = 0, container: Literal["list", "sequential", "none"] = "none"
    ) -> int:
        """A node of the module tree; a `ModuleList` has no forward of its own."""
        is_wrappable = class_name != "ModuleList"
        self.modules.append(Module(path, class_name, parent, container, False, False, is_wrappable, 0))
        return len(self.modules) - 1

    def standing(self, nbytes: int, category: Category) -> int:
        """A storage that is there before the step and after it."""
        self._storages.append(_Storage(nbytes, category, -1, self._module, "other", 0, outlives_step=True))
        return len(self._storages) - 1

    def weight(self, num_elements: int, *, is_trained: bool = True) -> Weight:
        """A parameter in bfloat16; a trained one has a float32 copy and Adam's two moments beside it."""
        weight = Weight(self.standing(2 * num_elements, "parameter"), 2 * num_elements, is_trained)
        if is_trained:
            self._trained.append(weight)
            self._states.append(self.standing(12 * num_elements, "optimizer_state"))
        return weight

    def size(self, storage: int) -> int:
        """Bytes of a storage."""
        return self._storages[storage].nbytes

    # -- forward ---------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, module: int, inputs: Sequence[int]) -> Iterator[None]:
        """What runs inside is a module's forward."""
        assert self._call is None, "blocks do not nest"
        self._call = _Call(module, len(self._ops), tuple(inputs))
        self._module = module
        yield
        self._call.end = len(self._ops)
        self._call.outputs = self._ops[-1].outputs
        self._calls.append(self._call)
        self._call, self._module = None, 0

    def run(
        self,
        name: str,
        inputs: Sequence[int],
        sizes: Sequence[int],
        *,
        flops: float = 0.0,
        saves: Sequence[int] = (),
        saves_outputs: Sequence[int] = (),
        weights: Sequence[Weight] = (),
        backward_flops: float | None = None,
        is_alias: bool = False,
    ) -> tuple[int, ...]:
        """One operation with one new storage per entry of `sizes`; the first is what gradients flow through.

        Args:
            saves: which of the inputs backward needs.
            saves_outputs: which of the outputs, by place.
            backward_flops: of the gradients of its inputs, and again of those of its weights; default: as forward.
            is_alias: the gradient of the output is, or contains, that of each input, without an operation.
        """
        inputs = tuple(inputs)
        number = len(self._ops)
        outputs = self._issue(name, (*inputs, *(weight.storage for weight in weights)), sizes, flops)
        wanting = tuple(storage for storage in inputs if storage in self._needs_gradient)
        trained = tuple(weight for weight in weights if weight.is_trained)
        if wanting or trained:
            self._needs_gradient.add(outputs[0])
            made = [_Save(storage, self._module, number) for storage in saves]
            made += [_Save(outputs[place], self._module, number + 1) for place in saves_outputs]
            self._saves.extend(made)
            for save in made:
                if self._storages[save.storage].category == "temporary":
                    self._storages[save.storage].category = "activation"
            flops_back = flops if backward_flops is None else backward_flops
            self._nodes.append(
                _Node(name, self._module, self._call, wanting, outputs[0], made, trained, flops_back, is_alias)
            )
        return outputs

    def begin_loss(self) -> None:
        """What follows belongs to the loss."""
        self._phase = "loss"

    # -- backward and optimizer ------------------------------------------------------------------------------------

    def backward(self, loss: int) -> None:
        """Everything autograd runs from the loss."""
        self._phase, self._module = "backward", 0
        (self._gradients[loss],) = self._issue("aten.ones_like.default", (), (4,), 0.0)
        for node in reversed(self._nodes):
            self._module = node.module
            first = len(self._ops)
            gradient = self._gradients.pop(node.output)
            if node.is_alias:
                parts = (gradient,) * len(node.inputs)
            else:
                parts = self._differentiate(node, gradient)
                for save in node.saves:
                    save.unpacked, save.released = first, len(self._ops)
            for storage, part in zip(node.inputs, parts, strict=True):
                self._accumulate(storage, part)
            if node.call is not None and len(self._ops) > first:
                if node.call.backward_start < 0:
                    node.call.backward_start = first
                node.call.backward_end = len(self._ops)

    def _differentiate(self, node: _Node, gradient: int) -> tuple[int, ...]:
        """Issues a node's operations: one for all its inputs, one per trained weight."""
        stem = node.name.split(".")[1]
        saved = [save.storage for save in node.saves]
        parts: tuple[int, ...] = ()
        if node.inputs:
            sizes = [self.size(storage) for storage in node.inputs]
            parts = self._issue(f"aten.{stem}_backward.default", (gradient,), sizes, node.flops, also_read=saved)
        for weight in node.weights:
            (made,) = self._issue(
                f"aten.{stem}_backward.default", (gradient,), (weight.nbytes,), node.flops, also_read=saved
            )
            self._storages[made].category = "gradient"
            self._storages[made].outlives_step = True
            self._weight_gradients.append(made)
        return parts

    def _accumulate(self, storage: int, part: int) -> None:
        before = self._gradients.get(storage)
        if before is None:
            self._gradients[storage] = part
        else:
            total = self._issue("aten.add.Tensor", (before, part), (self.size(storage),), 0.0)
            (self._gradients[storage],) = total

    def optimizer_step(self, *, is_foreach: bool = False) -> None:
        """Adam: fused, or with foreach's float32 temporaries of all gradients at once."""
        self._phase, self._module = "optimizer", -1
        reads = [weight.storage for weight in self._trained] + self._weight_gradients + self._states
        temporaries: tuple[int, ...] = ()
        if is_foreach:
            total = 2 * sum(weight.nbytes for weight in self._trained)
            temporaries = self._issue("aten._foreach_sqrt.default", reads, (total,), 0.0)
        self._issue("aten._fused_adamw_.default", (*reads, *temporaries), (), 0.0)

    # -- records ---------------------------------------------------------------------------------------------------

    def _issue(
        self, name: str, reads: Sequence[int], sizes: Sequence[int], flops: float, *, also_read: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """One operation; `also_read` is read through autograd, which keeps it alive itself."""
        number = len(self._ops)
        outputs = []
        for nbytes in sizes:
            self._storages.append(_Storage(nbytes, "temporary", number, self._module, self._phase, number))
            outputs.append(len(self._storages) - 1)
        for storage in reads:
            self._storages[storage].last_use = number
        inputs = tuple(dict.fromkeys((*reads, *also_read)))
        moved_bytes = sum(self.size(storage) for storage in (*inputs, *outputs))
        work_seconds = max(flops / self.costs.flops_per_second, moved_bytes / self.costs.memory_bytes_per_second)
        self._ops.append(
            Op(
                name=self._names.setdefault(name, len(self._names)),
                module=self._module,
                phase=self._phase,
                seconds=work_seconds + self.costs.launch_seconds,
                flops=int(flops),
                inputs=inputs,
                outputs=tuple(outputs),
                writes=(),
            )
        )
        return tuple(outputs)

    def trace(self, fingerprint: str) -> Trace:
        """The finished step as a trace of one steady step."""
        num_ops = len(self._ops)
        released = [0] * len(self._storages)
        for save in self._saves:
            assert save.released >= 0, "a saved tensor that backward never asked for"
            released[save.storage] = max(released[save.storage], save.released)
        storages = []
        for storage, last_release in zip(self._storages, released, strict=True):
            dropped = num_ops if storage.outlives_step else storage.last_use + 1
            storages.append(
                Storage(
                    nbytes=storage.nbytes,
                    device=DEVICE,
                    category=storage.category,
                    birth=storage.birth,
                    dropped=dropped,
                    death=max(dropped, last_release),
                    module=storage.module,
                    phase=storage.phase,
                    batched=storage.category in ("activation", "temporary"),
                )
            )
        step = Step(
            kind="steady",
            ops=tuple(self._ops),
            storages=tuple(storages),
            saved=tuple(
                SavedTensor(s.storage, s.module, self.size(s.storage), s.packed, s.unpacked, s.released)
                for s in self._saves
            ),
            calls=tuple(
                ModuleCall(c.module, c.start, c.end, c.backward_start, c.backward_end, c.inputs, c.outputs)
                for c in self._calls
            ),
            marks=(),
            wall_seconds=sum(op.seconds for op in self._ops),
            process_peak_bytes=0,
        )
        return Trace(
            schema="memwall.trace/2",
            source="fake",
            device=DEVICE,
            torch_version="",
            num_threads=1,
            model_fingerprint=fingerprint,
            optimizer="AdamW",
            micro_batch=1,
            gradients_persist=False,
            num_micro_batches=1,
            autocast="none",
            is_parked=False,
            base_bytes=0,
            workspace_bytes=0,
            machine=Machine(),
            names=tuple(self._names),
            modules=tuple(self.modules),
            steps=(step,),
        )
