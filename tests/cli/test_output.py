"""A file's content reaches a terminal as text: no name in it moves the cursor, or sets a window's title."""

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memwall.cli.app import main
from memwall.cli.output import Plain

HOSTILE = "layer\x1b]0;owned\x07\x1b[2J\r\x9b31m‮end"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_in_a_table_are_written_out(is_terminal: bool) -> None:
    table = Table()
    table.add_column("name")
    table.add_row(Text(HOSTILE))
    table.add_row(Text("mine", style="bold"))
    file = io.StringIO()
    colors = "standard" if is_terminal else None
    Console(file=file, force_terminal=is_terminal, color_system=colors, width=200).print(Plain(table))
    shown = file.getvalue()
    assert "\x1b]0;" not in shown
    assert "\x1b[2J" not in shown
    assert not set(shown) & set("\x07\x9b‮")
    assert r"layer\x1b]0;owned" in shown
    assert ("\x1b[1mmine" in shown) is is_terminal, "styles stay"


def test_control_characters_in_an_error_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", HOSTILE]) == 2
    shown = capsys.readouterr().err
    assert not set(shown) & set("\x1b\x07\x9b‮")
    assert r"\x1b]0;owned\x07" in shown
