"""Describes what a packed tensor consists of."""

BLOCK_ELEMENTS = 128
"""So many elements share a unit."""

LEVELS = 127.0
"""The largest code: units are the largest magnitude of a block over this."""

SMALLEST_UNIT = 2.0**-126
"""fp32's smallest normal number: below it a unit counts as 0, since GPUs may flush what it is divided into."""
