"""What `memwall explain snapshot.pickle` shows, as a reader sees it on 80 columns."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_history import MIB, History, frame
from rich.console import Console

from memwall.predict.snapshot.analysis import DeviceAnalysis, analyse_device
from memwall.report.snapshot_grids import failure_grid, holder_grids, moment_grid, pin_grid, snapshot_grids
from memwall.report.text import snapshot_report
from memwall.trace.snapshot.read import load_snapshot

Analyse = Callable[[History], DeviceAnalysis]

TRAIN = frame("/home/me/work/train.py", 42, "step")
MODEL = frame("/home/me/work/[bold]model.py", 7, "forward")

GOLDEN = """\
· peak 44.0 MiB in use on GPU 0, after event 7 of 12; 52.0 MiB held, of which
8.0 MiB (15.4%) lay free between blocks in use

Memory of the caching allocator
                         most in use   most held
────────────────────────────────────────────────
after event                        7          12
held from the device        52.0 MiB    72.0 MiB
in tensors                  44.0 MiB    28.0 MiB
waiting for a stream             0 B     8.0 MiB
free between blocks          8.0 MiB    16.0 MiB
free in whole segments           0 B    20.0 MiB
fragmentation                  15.4%       50.0%
largest free piece           4.0 MiB    20.0 MiB

Out of memory
event   asked for   free on the device   free between blocks   free segments
────────────────────────────────────────────────────────────────────────────
   10    64.0 MiB              5.0 MiB              16.0 MiB             0 B

In the peak, by line
line                             at peak   share
────────────────────────────────────────────────
work/train.py:42 step           28.0 MiB   63.6%
work/[bold]model.py:7 forward   16.0 MiB   36.4%

Segments partly in use when most was held
largest block by                 segment   free in it   blocks
──────────────────────────────────────────────────────────────
work/[bold]model.py:7 forward   20.0 MiB     12.0 MiB        1
work/train.py:42 step           30.0 MiB      2.0 MiB        1
work/train.py:42 step            2.0 MiB      2.0 MiB        1

Counted: memory of torch's caching allocator. Not in it: the CUDA context,
libraries that allocate for themselves (NCCL), other processes.
"""


def history() -> History:
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB, [MODEL, TRAIN])
    history.alloc(8 * MIB, 8 * MIB, 8 * MIB, [MODEL, TRAIN])
    history.segment(100 * MIB, 2 * MIB, "small")
    history.alloc(100 * MIB, 100, 512, [TRAIN])
    history.segment(200 * MIB, 30 * MIB)
    history.alloc(200 * MIB, 28 * MIB, 28 * MIB, [TRAIN])
    history.free(0)
    history.request_free(8 * MIB)
    history.oom(64 * MIB, 5 * MIB)
    history.segment(300 * MIB, 20 * MIB)
    return history


@pytest.fixture
def analyse(tmp_path: Path) -> Analyse:
    def run(history: History) -> DeviceAnalysis:
        (tmp_path / "s.pickle").write_bytes(pickle.dumps(history.snapshot()))
        return analyse_device(load_snapshot(tmp_path / "s.pickle"), 0)[0]

    return run


def shown(*analyses: DeviceAnalysis) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(snapshot_report(analyses))
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def test_the_whole_report(analyse: Analyse) -> None:
    assert shown(analyse(history())) == GOLDEN


def test_categories_are_shown_where_there_are_any(analyse: Analyse) -> None:
    made = History()
    made.segment(0, 20 * MIB)
    made.alloc(0, 8 * MIB, 8 * MIB, category="optimizer_state")
    made.alloc(8 * MIB, 2 * MIB, 2 * MIB)
    by_category, by_line = holder_grids(analyse(made))
    assert by_category.rows == (("optimizer state", "8.0 MiB", "80.0%"), ("unknown", "2.0 MiB", "20.0%"))
    assert by_line.rows == (("(no stack recorded)", "10.0 MiB", "100.0%"),)


def test_long_tables_end_with_what_they_leave_out(analyse: Analyse) -> None:
    made = History()
    for index in range(15):
        made.segment(100 * index * MIB, 20 * MIB)
        made.alloc(100 * index * MIB, (2 + index) * MIB, (2 + index) * MIB, [frame("t.py", index, "f")])
        made.oom(MIB, 0)
    analysis = analyse(made)
    by_line = holder_grids(analysis)[-1]
    assert len(by_line.rows) == 11
    assert by_line.rows[-1] == ("5 others", "20.0 MiB", "14.8%")
    assert pin_grid(analysis).title == "Segments partly in use when most was held, 5 more not shown"
    assert len(pin_grid(analysis).rows) == 10
    failures = failure_grid(analysis)
    assert failures is not None
    assert failures.title == "Out of memory, the first 10 of 15"


def test_expandable_memory_has_a_row_of_its_own(analyse: Analyse) -> None:
    made = History()
    made.segment(0, 20 * MIB, is_expandable=True)
    made.alloc(0, 8 * MIB, 8 * MIB)
    made.free(0)
    rows = {name: tuple(cells) for name, *cells in moment_grid(analyse(made)).rows}
    assert moment_grid(analyse(made)).columns == ("", "most in use", "at the end")
    assert rows["free, expandable"] == ("12.0 MiB", "0 B")
    assert rows["free in whole segments"] == ("0 B", "20.0 MiB")
    assert "waiting for a stream" not in rows


def test_without_a_history_the_report_says_so(analyse: Analyse) -> None:
    made = history()
    made.events.clear()
    text = shown(analyse(made))
    assert text.startswith("· peak 36.0 MiB in use on GPU 0, at the end; 72.0 MiB held")
    assert "Note: no history was recorded" in text
    assert "most held" not in text.split("Segments")[0]


def test_a_snapshot_of_nothing_says_so() -> None:
    assert shown().startswith("· the snapshot holds no memory and no history; was CUDA used before it was\ntaken?\n")


def test_a_device_without_memory_has_no_empty_tables(analyse: Analyse) -> None:
    made = History()
    made.oom(64 * MIB, 5 * MIB)
    titles = [grid.title for grid in snapshot_grids(analyse(made))]
    assert titles == ["Memory of the caching allocator", "Out of memory"]
