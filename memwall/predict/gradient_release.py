"""A step whose optimizer steps parameters within backward, a few at a time, and lets go of their gradients at once."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from memwall.predict.parameters_on_disk import last_gradient_uses
from memwall.predict.state_on_disk import shrink_temporaries
from memwall.trace.records import Step, Storage


class Flush(NamedTuple):
    """Says when some gradients are used together."""

    after: int
    """The operation after which they are."""
    gradients: tuple[int, ...]
    """Their storages."""
    num_bytes: int


def flushes_of(step: Step, window_bytes: int) -> list[Flush]:
    """Returns when gradients are used: as soon as those that are whole have so many bytes, or backward ends.

    Those that have to wait for the optimizer are not among them.
    """
    waiting = Counter(nbytes for _, nbytes in (step.gradient_use.waiting if step.gradient_use else ()))
    whole = [i for i, s in enumerate(step.storages) if s.category == "gradient" and s.birth >= 0]
    uses = last_gradient_uses(step, whole)
    found: list[Flush] = []
    pending: list[int] = []
    pending_bytes = 0
    # Which gradient is whose, a trace does not know; they have their parameters' sizes.
    for index in sorted(whole, key=lambda index: uses[index]):
        num_bytes = step.storages[index].nbytes
        if waiting[num_bytes] > 0:
            waiting[num_bytes] -= 1
            continue
        pending.append(index)
        pending_bytes += num_bytes
        if pending_bytes >= window_bytes:
            found.append(Flush(uses[index], tuple(pending), pending_bytes))
            pending, pending_bytes = [], 0
    if pending:
        end = max((number for number, op in enumerate(step.ops) if op.phase == "backward"), default=0)
        found.append(Flush(end, tuple(pending), pending_bytes))
    return found


def with_gradients_released(step: Step, names: Sequence[str], *, window_bytes: int) -> Step:
    """Returns the step with gradients in memory for as long as it takes to use them.

    Args:
        names: of the trace.
        window_bytes: gradients that are used together.
    """
    flushes = flushes_of(step, window_bytes)
    if not flushes:
        return step
    storages = list(step.storages)
    made_bytes = _made_bytes(step, names)
    all_bytes = sum(s.nbytes for s in step.storages if s.category == "gradient")
    dying = Counter[int]()
    for storage in step.storages:
        if storage.category != "gradient":
            dying[storage.death - 1] += storage.nbytes
    for flush in flushes:
        for index in flush.gradients:
            end = flush.after + 1
            storages[index] = msgspec.structs.replace(storages[index], dropped=end, death=end)
        largest_bytes = max(step.storages[index].nbytes for index in flush.gradients)
        # What is made meanwhile takes the place of what the operation before has let go of.
        passing_bytes = made_bytes(flush.num_bytes, largest_bytes) - dying[flush.after]
        if passing_bytes > 0:
            like = step.storages[flush.gradients[0]]
            storages.append(
                msgspec.structs.replace(
                    like,
                    nbytes=passing_bytes,
                    category="temporary",
                    birth=flush.after,
                    dropped=flush.after + 1,
                    death=flush.after + 1,
                    phase="backward",
                )
            )
    left_share = 1 - sum(flush.num_bytes for flush in flushes) / max(1, all_bytes)
    shrink_temporaries(storages, step, left_share)
    if left_share <= 0:
        for index, storage in enumerate(step.storages):
            if _is_made_by_optimizer(step, storage):
                storages[index] = msgspec.structs.replace(storages[index], nbytes=0)
    return msgspec.structs.replace(step, storages=tuple(storages))


def _is_made_by_optimizer(step: Step, storage: Storage) -> bool:
    is_made = storage.category == "temporary" and 0 <= storage.birth < len(step.ops)
    return is_made and step.ops[storage.birth].phase == "optimizer"


class _Made(NamedTuple):
    """Says what the optimizer makes to step parameters: of all of them together, or one after the other."""

    most_bytes: int
    all_bytes: int
    largest_bytes: int
    is_together: bool

    def __call__(self, num_bytes: int, largest_bytes: int) -> int:
        """Returns that for gradients of so many bytes.

        Args:
            largest_bytes: those of the largest one.
        """
        if self.is_together:
            return self.most_bytes * num_bytes // max(1, self.all_bytes)
        return self.most_bytes * largest_bytes // max(1, self.largest_bytes)


def _made_bytes(step: Step, names: Sequence[str]) -> _Made:
    change = Counter[int]()
    is_together = any("_foreach_" in names[op.name] for op in step.ops if op.phase == "optimizer")
    for storage in step.storages:
        if _is_made_by_optimizer(step, storage):
            change[storage.birth] += storage.nbytes
            change[max(storage.death, storage.birth + 1)] -= storage.nbytes
    most_bytes = held_bytes = 0
    for number in sorted(change):
        held_bytes += change[number]
        most_bytes = max(most_bytes, held_bytes)
    sizes = [s.nbytes for s in step.storages if s.category == "gradient"]
    return _Made(most_bytes, sum(sizes), max(sizes, default=0), is_together)
