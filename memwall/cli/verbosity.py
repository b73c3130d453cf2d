"""Gives every command the option -v, which none of their functions needs to know of."""

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

_Option = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Log what is done and why; -vv more.")
]


def is_verbose() -> bool:
    """Tells whether -v, or MEMWALL_LOG, asks for more than warnings."""
    return logging.getLogger("memwall").isEnabledFor(logging.INFO)


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the function of a command with one more option, which sets the level of memwall's log."""

    @wraps(command)
    def run(*args: Any, verbose: int, **options: Any) -> None:
        if verbose:
            logger = logging.getLogger("memwall")
            # MEMWALL_LOG may ask for more than that.
            logger.setLevel(min(logger.level or logging.WARNING, logging.INFO if verbose == 1 else logging.DEBUG))
        command(*args, **options)

    known = inspect.signature(command)
    option = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=_Option)
    # typer reads the options of a command from here.
    run.__signature__ = known.replace(parameters=[*known.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "verbose": _Option}
    return run
