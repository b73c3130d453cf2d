"""The state of the code that a result is measured with."""

import subprocess
from pathlib import Path

__all__ = ["commit", "git"]


def git(*arguments: str) -> str:
    """Returns what git prints of this repository; nothing where it cannot."""
    folder = str(Path(__file__).parent)
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def commit() -> str:
    """Returns the first digits of the commit that is checked out."""
    return git("rev-parse", "--short=12", "HEAD")
