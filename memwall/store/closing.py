"""Gives classes the two methods by which a `with` block closes them where it ends."""

from typing import Self


class Closing:
    """Is given back by `close`, or at the end of a `with` block."""

    def close(self) -> None:
        """Gives back what is held; safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
