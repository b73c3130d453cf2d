"""Gives every command the option -v, which none of their functions needs to know of."""

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

VerboseOption = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Log what is done and why; -vv more.")
]


def is_verbose() -> bool:
    """Tells whether -v, or MEMWALL_LOG, asks for more than warnings."""
    return logging.getLogger("memwall").isEnabledFor(logging.INFO)


def set_verbosity(num_times: int) -> None:
    """Sets the level of memwall's log by how often -v was given; a lower one stays, which MEMWALL_LOG may ask for."""
    if num_times:
        logger = logging.getLogger("memwall")
        logger.setLevel(min(logger.level or logging.WARNING, logging.INFO if num_times == 1 else logging.DEBUG))


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the function of a command with one more option, which sets the level of memwall's log."""

    @wraps(command)
    def run(*args: Any, verbose: int, **options: Any) -> None:
        set_verbosity(verbose)
        command(*args, **options)

    known = inspect.signature(command)
    option = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=VerboseOption)
    # typer reads the options of a command from here.
    run.__signature__ = known.replace(parameters=[*known.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "verbose": VerboseOption}
    return run
