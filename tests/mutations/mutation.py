"""Describes a fault that the project has had, by a change of one place that brings it back."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """Names a fault, the text in a file that keeps it away, what stands there with the fault, and who notices.

    The text occurs once in its file. Tests are what pytest takes: files, or names in them.
    """

    fault: str
    path: str
    text: str
    faulty: str
    tests: tuple[str, ...]
