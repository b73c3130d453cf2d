"""Results that take an argument's place in a plain step, and have storages of their own while somebody watches."""

import msgspec

from memwall.trace.records import Step


class InPlace:
    """Rewrites a recorded step, in which arguments live on as results.

    A result's own storage stays without bytes: storages of an operation stay in the order in which it allocates them.
    """

    def __init__(self, step: Step) -> None:
        self.storages = list(step.storages)
        self._recorded = step
        self._stands_for: dict[int, int] = {}
        """Storage of the argument, by the storage that the result had."""

    def of(self, index: int) -> int:
        """Returns the storage that stands for a recorded one."""
        return self._stands_for.get(index, index)

    def is_possible(self, argument: int, result: int, number: int) -> bool:
        """Tells whether an operation's result is new, and as large as an argument that dies of it."""
        old, new = self.storages[argument], self.storages[result]
        alike = (old.nbytes, old.dtype, old.device) == (new.nbytes, new.dtype, new.device)
        return alike and new.birth == number and old.death == number + 1

    def let_live(self, argument: int, result: int, number: int) -> None:
        """Has the argument of an operation live on as its result."""
        old, new = self.storages[argument], self.storages[result]
        self.storages[argument] = msgspec.structs.replace(new, birth=old.birth)
        self.storages[result] = msgspec.structs.replace(new, nbytes=0, dropped=number, death=number)
        self._stands_for[result] = argument

    def step(self) -> Step:
        """Returns the step as it is then."""
        if not self._stands_for:
            return self._recorded
        replace = msgspec.structs.replace
        return replace(
            self._recorded,
            storages=tuple(self.storages),
            ops=tuple(
                replace(
                    op, inputs=self._named(op.inputs), outputs=self._named(op.outputs), writes=self._named(op.writes)
                )
                if any(number in self._stands_for for number in (*op.inputs, *op.outputs, *op.writes))
                else op
                for op in self._recorded.ops
            ),
            saved=tuple(
                replace(saving, storage=self.of(saving.storage)) if saving.storage in self._stands_for else saving
                for saving in self._recorded.saved
            ),
            calls=tuple(
                replace(call, inputs=self._named(call.inputs), outputs=self._named(call.outputs))
                if any(number in self._stands_for for number in (*call.inputs, *call.outputs))
                else call
                for call in self._recorded.calls
            ),
        )

    def _named(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(self.of, numbers)))
