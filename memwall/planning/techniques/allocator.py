"""Allocator: how freed memory is kept or returned, so that the process holds little more than its tensors."""

from collections.abc import Sequence

from memwall.errors import UsageError
from memwall.planning.action import Action
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import Technique
from memwall.predict.cuda_allocator.advice import VARIABLES
from memwall.predict.cuda_allocator.allocator_settings import is_well_formed
from memwall.predict.process import Resident
from memwall.units import format_bytes


class AllocatorReuse(Action, frozen=True, kw_only=True, tag="allocator"):
    """Keeps or returns freed memory: by a heap for tensors on a CPU, by a string on CUDA."""

    policy: str
    """"tensor-heap", or "cuda-settings"."""
    limit_bytes: int = 0
    """Process bytes from which on the tensor heap returns free pages before it takes new ones; 0 for none."""
    outside_bytes: int = 0
    """Bytes of these that a step needs outside the heap and gives back: workspace, staging, small tensors."""
    cuda_setting: str = ""
    """Complete PYTORCH_ALLOC_CONF string; must be in the environment before CUDA starts."""

    def __post_init__(self) -> None:
        """Refuses a string that is more than a setting: plans are passed on, and it becomes a variable's value.

        Raises:
            ValueError: it is not of the form name:value,name:value; names and values are the apply stage's to judge.
        """
        if self.cuda_setting and not is_well_formed(self.cuda_setting):
            raise ValueError(
                f"cuda_setting {self.cuda_setting!r} is no allocator setting; expected name:value,name:value, as "
                "'expandable_segments:True'"
            )


class _Allocator(Technique[AllocatorReuse]):
    record = AllocatorReuse
    order = 50

    def settled_action(
        self, inputs: SearchInputs, resident: Resident, process_bytes: int, window_bytes: int
    ) -> AllocatorReuse | None:
        if resident.is_default:
            return None
        # What else grows in the process is made up for by free pages of the heap, and the margin is for what grows
        # between two looks at it: with half of it for free pages, one run in five passed its budget.
        return AllocatorReuse(
            policy=resident.policy,
            limit_bytes=0 if resident.cuda_setting else min(process_bytes, inputs.settings.budget_bytes),
            outside_bytes=resident.outside_bytes + window_bytes,
            cuda_setting=resident.cuda_setting,
            saved_bytes=resident.saved_bytes or None,
            cost_seconds=resident.fault_seconds - inputs.plain_fault_seconds,
        )

    def what(self, action: AllocatorReuse) -> str:
        return "allocator settings" if action.cuda_setting else f"allocator policy {action.policy}"

    def where(self, actions: Sequence[AllocatorReuse]) -> str:
        action = actions[0]
        if action.cuda_setting:
            return f"process, before CUDA starts: {action.cuda_setting}"
        if not action.limit_bytes:
            return "process"
        return f"process; free pages returned above {format_bytes(action.limit_bytes)}"

    def environment(self, action: AllocatorReuse) -> dict[str, str] | None:
        if ">" in action.cuda_setting:
            raise UsageError(
                f"the plan's allocator setting '{action.cuda_setting}' has a '>', which a shell takes for "
                "a redirection; name the intervals above the last one (each power of two up to 32768) in its place"
            )
        return dict.fromkeys(VARIABLES, action.cuda_setting) if action.cuda_setting else None

    def required_cuda_setting(self, action: AllocatorReuse) -> str:
        return action.cuda_setting


TECHNIQUE = _Allocator()
