"""The base of every action of a plan: of the record that each technique in `planning.techniques` has."""

from typing import Literal

from msgspec import Struct

Exactness = Literal["bit-exact", "equivalent", "changes-numerics"]
"""Whether training under an action gives the same bits, the same mathematics with other rounding, or other numbers."""


class Action(Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Holds one decision with its parameters; in a plan file its tag stands under "kind"."""

    saved_bytes: int | None = None
    """Bytes that it takes off the step's peak, or that it keeps on the next tier; None where that is not known."""
    cost_seconds: float | None = None
    """Seconds that it adds to a step; None where that is not known."""
    exactness: Exactness = "bit-exact"
