"""Holds what `memwall plan` was asked, checks that it goes together, and gets the step that is planned."""

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from memwall.cli.plans.plan_source import Source, device_trace, is_spec, trace_here, with_disk_below_host, with_measured
from memwall.errors import UsageError
from memwall.integrations.hugging_face.hf_config import config_path

if TYPE_CHECKING:
    from memwall.cli.options import DiskChoice
    from memwall.cli.plans.plan_ranks import RanksAsked
    from memwall.machine.hardware import Hardware
    from memwall.planning.planfile import Plan
    from memwall.planning.recordings import Recordings
    from memwall.trace.records import Route, Trace


class ModelAsked(Struct, frozen=True, kw_only=True):
    """Holds what was asked of a model and its batches, all of which is recorded in a trace; None where nothing was."""

    batch: int | None
    sequence: int | None
    optimizer: str | None
    dtype: str | None
    autocast: str | None
    is_checkpointed: bool
    lora: str | None
    eval_batch: int | None
    mask_share: float | None
    route: "Route"

    @property
    def given(self) -> str:
        """The names of the options that were given."""
        values: dict[str, Any] = {
            "--batch": self.batch,
            "--seq": self.sequence,
            "--optimizer": self.optimizer,
            "--dtype": self.dtype,
            "--autocast": self.autocast,
            "--checkpointing": self.is_checkpointed or None,
            "--lora": self.lora,
            "--eval-batch": self.eval_batch,
            "--mask-share": self.mask_share,
            "--route": None if self.route == "translate" else self.route,
        }
        return ", ".join(option for option, value in values.items() if value is not None)


class PlanRequest(Struct, frozen=True, kw_only=True):
    """Holds what was asked."""

    source: str
    device: str | None
    hardware: "Hardware | None"
    """The device of the table that is planned for; None for the one that the step is recorded on."""
    budget_bytes: int
    host_bytes: int | None
    """Host memory that tensors may move to, of one rank."""
    disk: "DiskChoice | None"
    no_disk: bool
    allowed: tuple[str, ...]
    global_batch: int | None
    model: ModelAsked
    ranks: "RanksAsked | None"

    def check(self) -> None:
        """Checks what can be checked before a step is recorded.

        Raises:
            UsageError: two options do not go together, or one has no place with this source.
        """
        if self.ranks is not None and self.model.eval_batch is not None:
            raise UsageError(
                f"--eval-batch {self.model.eval_batch}: not together with --ranks; plan one process with it"
            )
        if self.hardware is None and self.model.given:
            raise UsageError(f"{self.model.given}: only together with --device NAME")
        if self.hardware is None:
            return
        if not is_spec(self.source) and self.model.given:
            raise UsageError(f"{self.model.given}: {self.source} is a trace, in which that is recorded; leave it out")
        if self.disk is not None and self.ranks is not None:
            raise UsageError(
                f"--disk {self.disk.directory}: of several ranks nothing is planned to be on disk; leave out "
                "--ranks, or --disk"
            )
        if self.disk is not None and not self.host_bytes:
            raise UsageError(
                f"--disk {self.disk.directory}: with --device NAME the optimizer's state reaches a disk through host "
                "memory; give --host SIZE as well"
            )
        if self.model.route == "phantom":
            _check_for_phantom(self.allowed)

    def recorded(self) -> Source:
        """Returns the step to plan for.

        Raises:
            UsageError: the source cannot be read, or the step is not of the device, the batch or the techniques that
                were asked for.
        """
        if self.hardware is None:
            found = trace_here(self.source, self.disk, allowed=self.allowed)
        else:
            found = device_trace(
                self.source,
                self.hardware,
                host_bytes=self.host_bytes or 0,
                allowed=self.allowed,
                is_evaluated=self.ranks is None,  # of several ranks it is not modelled
                **{**asdict(self.model), "batch": self._batch()},
            )
        if self.host_bytes:
            found = with_measured(found, self.allowed)
        if self.hardware is not None and self.disk is not None:
            found = with_disk_below_host(found, self.disk)
        _check_recordable(self.source, self.allowed, None if self.ranks is not None else found.recordings)
        self._check_device(found.trace)
        if self.ranks is not None:
            self.ranks.check_batch(self.global_batch, found.trace)
        return found

    def plan_for(self, found: Source, budget_bytes: int) -> "Plan":
        """Returns the plan of the recorded step for so many bytes, with the evaluation that follows it.

        Raises:
            InfeasibleError: no plan fits.
        """
        from memwall.planning.search import plan

        capacity_bytes = None if self.disk is None else self.disk.limit_bytes
        made = plan(
            found.trace,
            budget=budget_bytes,
            disk=None if self.disk is None else str(self.disk.directory),
            tier_capacity_bytes=capacity_bytes if found.trace.device == "cpu" else self.host_bytes,
            no_disk=self.no_disk,
            allow=self.allowed,
            global_batch=self.global_batch,
            hardware=self.hardware,
            recordings=found.recordings,
        )
        return made if found.evaluated is None else found.evaluated(made)

    def _batch(self) -> int | None:
        """Returns the samples of one rank's forward; a factory's or a trace's are its own."""
        if config_path(self.source) is None:
            return self.model.batch
        if self.ranks is not None:
            return self.ranks.batch_of(self.global_batch, self.model.batch)
        return self.global_batch if self.model.batch is None else self.model.batch

    def _check_device(self, trace: "Trace") -> None:
        if self.hardware is None and self.device not in (None, trace.device):
            raise UsageError(
                f"--device {self.device}: the trace was recorded on {trace.device}; to plan for another device give "
                "its name, as in --device h100-80gb, or leave --device out"
            )


def _check_for_phantom(allow: tuple[str, ...]) -> None:
    """Raises UsageError where kernels are asked for: a process of its own makes the layers that they would replace."""
    from memwall.planning.modes import has_mode
    from memwall.planning.techniques import kernels

    word = kernels.TECHNIQUE.allow
    if word in allow and not has_mode(allow):
        raise UsageError(
            f"--allow {word}: the step is not recorded with {word} on the phantom device; leave --route phantom out"
        )


def _check_recordable(source: str, allow: tuple[str, ...], recordings: "Recordings | None") -> None:
    """Raises UsageError where a technique is allowed of which a trace file does not show what it does to the step."""
    from memwall.planning.modes import has_mode
    from memwall.planning.technique import techniques

    for technique in techniques():
        word = technique.allow
        is_offered = recordings is not None and word in recordings.offered
        if technique.is_seen_recorded and word in allow and not is_offered and not has_mode(allow):
            raise UsageError(
                f"--allow {word}: {source} is a trace, and what {word} do to a step is seen by recording it with them; "
                f"plan from the package.module:factory or the config.json, or give --allow {word} to `memwall run`"
            )
