"""Knows the names of dtypes that people write, and what torch calls them, for every option that takes one."""

from collections.abc import Sequence

from memwall.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16")
"""Weights and activations can be traced in these."""

_NAMES = {
    **{name: name for name in DTYPES},
    **dict.fromkeys(("float", "fp32", "f32"), "float32"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
}


def known_dtype(name: str) -> str | None:
    """Returns torch's name of a dtype, as `bfloat16` for `BF16` or `torch.bfloat16`; None if it is none of `DTYPES`."""
    return _NAMES.get(name.lower().removeprefix("torch."))


def parse_dtype(name: str, *, option: str, among: Sequence[str] = DTYPES) -> str:
    """Returns torch's name of the dtype that an option asks for.

    Args:
        option: what an error calls it, as `--dtype`.
        among: those of `DTYPES` that the option takes.

    Raises:
        UsageError: the name is none of theirs.
    """
    found = known_dtype(name)
    if found is None or found not in among:
        raise UsageError(f"{option}: '{name}' is not known; expected one of {', '.join(among)}")
    return found
