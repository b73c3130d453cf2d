"""Optimizers that a session gets to know as `memwall run` does."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.session.session import Session

__all__ = ["shown_at_first_step"]


@contextmanager
def shown_at_first_step(session: Session) -> Iterator[None]:
    """As under `memwall run`: an optimizer is known from its first step on."""
    handle = register_optimizer_step_pre_hook(lambda found, *_: session.add_optimizer(found))
    try:
        yield
    finally:
        handle.remove()
