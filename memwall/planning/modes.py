"""Three presets of what is allowed, one word each; which techniques a preset has follows from their exactness.

A preset offers what it can: of its techniques those that a run, its model or its device rules out are left out. What is
allowed by its own word has to be possible.
"""

from collections.abc import Sequence

from memwall.errors import UsageError
from memwall.planning.action import Exactness
from memwall.planning.ranks.kinds import KINDS
from memwall.planning.technique import allowable, techniques

MODES: dict[str, tuple[str, tuple[Exactness, ...]]] = {
    "exact": ("the same bits; so it is where nothing is allowed", ()),
    "balanced": ("also what computes the same and rounds at other points", ("equivalent",)),
    "smallest": ("also what changes numerics: the smallest budget that can be met", ("equivalent", "changes-numerics")),
}
"""Mode -> what it means, and how exact the techniques are that it allows beside the bit-exact ones."""


def every_word() -> dict[str, str]:
    """Returns the words of --allow, those of ways to divide a model among ranks too, each with what it means."""
    return allowable() | {kind.allow: kind.allow_means for kind in KINDS if kind.allow}


def check_one_process(allow: Sequence[str]) -> None:
    """Checks that nothing is allowed by its own word that only ways to divide a model among ranks do.

    Raises:
        UsageError: it is.
    """
    if has_mode(allow):
        return
    for word in every_word().keys() - allowable().keys():
        if word in allow:
            raise UsageError(
                f"--allow {word} is for how a model is divided: only with `memwall plan --device NAME --ranks N`, by "
                "whose plan memwall.shard(model, plan) does it"
            )


def allowed_words(words: Sequence[str], *, option: str = "allow") -> tuple[str, ...]:
    """Returns what is allowed: each word of a technique once, in a fixed order, after the mode if one was given.

    >>> allowed_words(["balanced"])
    ('balanced', 'kernels', 'graphs')

    Args:
        option: what an error calls it.

    Raises:
        UsageError: a word is unknown, two modes were given, or a mode and what it does not allow.
    """
    known, modes = every_word(), [mode for mode in MODES if mode in words]
    exactness: dict[str, Exactness] = dict.fromkeys(known, "changes-numerics")
    exactness |= {one.allow: one.allow_exactness for one in techniques() if one.allow}
    for word in words:
        if word not in known and word not in MODES:
            raise UsageError(
                f"{option}: '{word}' is not known; expected one or more of {', '.join(known)}, or a mode: "
                f"{', '.join(MODES)}"
            )
    if not modes:
        return tuple(word for word in known if word in words)
    if len(modes) > 1:
        raise UsageError(f"{option}: {' and '.join(modes)} are modes; expected one of them")
    (mode,) = modes
    _, allows = MODES[mode]
    # What keeps the bits and yet needs its word binds the loop: no mode has it, and any may have it beside.
    offered = [
        word for word in known if exactness[word] in allows or (exactness[word] == "bit-exact" and word in words)
    ]
    for word in words:
        if word in known and word not in offered:
            wider = next(each for each, (_, exact) in MODES.items() if exactness[word] in exact)
            raise UsageError(
                f"{option}: the mode {mode} rules out {word}, which is allowed beside it; leave one of them out, or "
                f"take {wider}"
            )
    return (mode, *offered)


def has_mode(allow: Sequence[str]) -> bool:
    """Returns whether what is allowed comes from a mode, of which only what is possible counts."""
    return any(mode in allow for mode in MODES)
