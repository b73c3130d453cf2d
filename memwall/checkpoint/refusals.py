"""Refuses optimizers and models of a script that cannot be committed, before anything is lost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memwall.checkpoint.discovery import shapes_of
from memwall.checkpoint.variables import Variables
from memwall.errors import StoreError, UsageError
from memwall.trace.optimizers import joint_name
from memwall.trace.together import models_of


def check_told_apart(directory: str, model: nn.Module, variables: Variables) -> None:
    """Checks that another process can tell models of one class and shape from each other, as a pair of critics.

    Raises:
        UsageError: no variable leads to one of them where the loop begins.
    """
    kinds = {each: repr((type(each), shapes_of(each))) for each in models_of(model)}
    counts = Counter(kinds.values())
    lost = next((each for each, kind in kinds.items() if counts[kind] > 1 and not variables.name_of(each)), None)
    if lost is not None:
        raise UsageError(
            f"--checkpoint {directory}: {counts[kinds[lost]]} models of class {type(lost).__name__} have parameters of "
            "the same names and shapes, and not each is in a variable of the script where its loop over memwall.steps "
            "begins, so that a resumed run could not tell them apart; keep each in a variable there"
        )


def steps_beside(
    directory: str, known: Sequence[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, *, has_tops: bool
) -> UsageError:
    """Returns the error of an optimizer that steps the model beside those that are committed.

    Args:
        has_tops: whether the script says where an iteration begins.
    """
    if has_tops:
        return UsageError(
            f"--checkpoint {directory} commits what is trained from the first step on, and this script goes on to make "
            f"another optimizer, {joint_name((optimizer,))}; make it before the loop, or run without --checkpoint and "
            "save in the script"
        )
    return UsageError(
        f"--checkpoint {directory}: {joint_name((*known, optimizer))} step this model, and nothing says where an "
        "iteration of all of them begins; loop over `for step in memwall.steps(NUM_STEPS)`"
    )


def steps_in_between(directory: str, optimizer: torch.optim.Optimizer) -> UsageError:
    """Returns the error of another model's step that falls between this model's and the commit of that."""
    return UsageError(
        f"--checkpoint {directory}: a {type(optimizer).__name__} of another model steps before the model that is "
        "committed is called again, so that the two would be committed from different steps; loop over `for step in "
        "memwall.steps(NUM_STEPS)`, which says where a step begins"
    )


def of_other_optimizers(
    saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], *, maker: str
) -> StoreError:
    """Returns the error of an optimizer that begins to step where the checkpoint is of others.

    Args:
        saved: what the checkpoint has of each of its optimizers.
        groups: names of the parameters in each group of the one here.
        maker: what to resume with.
    """
    of = [f"a {one['class']} with {_groups_text([group['parameters'] for group in one['groups']])}" for one in saved]
    return StoreError(
        f"the checkpoint is of {' and '.join(of)}, and this script has a {type(optimizer).__qualname__} with "
        f"{_groups_text(groups)}; resume with {maker}"
    )


def _groups_text(groups: Sequence[Sequence[str]]) -> str:
    return f"{len(groups)} group{'s' if len(groups) != 1 else ''} of {', '.join(str(len(group)) for group in groups)}"
