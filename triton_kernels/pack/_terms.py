"""Describes what a packed tensor consists of."""

import torch

BLOCK_ELEMENTS = 128
"""So many elements share a unit."""

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The dtype of codes, by form."""

LEVELS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code, by dtype: units are the largest magnitude of a block over this."""

SMALLEST_UNIT = 2.0**-126
"""fp32's smallest normal number: below it a unit counts as 0, since GPUs may flush what it is divided into."""
