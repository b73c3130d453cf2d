"""The trace file: what is written comes back, and what is none of ours is refused with what to do about it."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zstandard
from torch import nn

from memwall.errors import TraceError
from memwall.trace.file import MAGIC, load_trace, save_trace
from memwall.trace.records import Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(
        Workload(
            model=lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
            batch=lambda: torch.ones(4, 8),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters),
        )
    )


@pytest.fixture
def path(trace: Trace, tmp_path: Path) -> Path:
    target = tmp_path / "a.mwtrace"
    save_trace(trace, target)
    return target


def written(path: Path, payload: bytes, *, head: bytes = b"memwall.trace/2\n") -> Path:
    path.write_bytes(head + zstandard.ZstdCompressor(write_checksum=True).compress(payload))
    return path


def fields_of(trace: Trace) -> dict[str, Any]:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(trace))
    assert isinstance(fields, dict)
    return fields


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as error:
        load_trace(path)
    return str(error.value)


def test_a_trace_comes_back_equal_and_nothing_else_is_left_in_the_folder(trace: Trace, path: Path) -> None:
    assert load_trace(path) == trace
    assert [entry.name for entry in path.parent.iterdir()] == ["a.mwtrace"]


def test_equal_traces_give_equal_bytes(trace: Trace, path: Path) -> None:
    other = path.with_name("b.mwtrace")
    save_trace(load_trace(path), other)
    assert other.read_bytes() == path.read_bytes()


def test_the_first_line_says_what_the_file_is(path: Path) -> None:
    assert path.read_bytes().startswith(b"memwall.trace/2\n")


def test_a_trace_that_cannot_be_written_says_where_and_leaves_no_part(trace: Trace, tmp_path: Path) -> None:
    target = tmp_path / "missing" / "a.mwtrace"
    with pytest.raises(TraceError) as error:
        save_trace(trace, target)
    assert str(error.value) == (
        f"cannot write the trace to {target}: No such file or directory; choose another -o FILE"
    )


def test_a_missing_file(tmp_path: Path) -> None:
    target = tmp_path / "none"
    assert refusal(target) == f"cannot read the trace {target}: No such file or directory"


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04", b"memwall.trace/", b"memwall.trace/x\n", b"\x80\x04]"])
def test_a_foreign_file(content: bytes, tmp_path: Path) -> None:
    target = tmp_path / "foreign"
    target.write_bytes(content)
    assert refusal(target) == (f"{target} is not a memwall trace; expected a file written by `memwall profile -o FILE`")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_file_cut_short(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert refusal(path).startswith(f"{path} is cut short or damaged (")
    assert refusal(path).endswith("); record it again")


def test_every_flipped_byte_is_noticed(trace: Trace, path: Path) -> None:
    content = path.read_bytes()
    unnoticed = []
    for place in range(len(MAGIC), len(content), max(1, len(content) // 200)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            if load_trace(path) != trace:
                unnoticed.append(place)
        except TraceError:
            pass
    assert not unnoticed


def test_a_file_that_claims_to_be_huge_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN 200 KB that unpack to gigabytes WHEN they are read THEN no memory is taken for them."""
    target = tmp_path / "bomb"
    whole = zstandard.ZstdCompressor().compressobj(size=65 << 20)
    payload = b"".join(whole.compress(bytes(1 << 20)) for _ in range(65)) + whole.flush()
    target.write_bytes(b"memwall.trace/2\n" + payload)

    def unpacked(*_: Any, **__: Any) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr(zstandard, "ZstdDecompressor", unpacked)
    assert refusal(target).startswith(f"{target} is cut short or damaged (it claims to hold 65.0 MiB in ")


@pytest.mark.parametrize(("index", "parent"), [(0, 0), (0, 1), (1, 1), (1, 2), (1, -2), (2, 1 << 40)])
def test_modules_whose_parents_do_not_lead_to_the_root(index: int, parent: int, trace: Trace, tmp_path: Path) -> None:
    modules = list(trace.modules)
    modules[index] = msgspec.structs.replace(modules[index], parent=parent)
    target = written(tmp_path / "cycle", msgspec.msgpack.encode(msgspec.structs.replace(trace, modules=tuple(modules))))
    assert refusal(target) == (
        f"{target} is not a valid trace: module {index} has parent {parent}, expected one before it, or -1 - at "
        "`$.modules`; record it again"
    )


def test_a_newer_version(trace: Trace, tmp_path: Path) -> None:
    target = written(tmp_path / "newer", msgspec.msgpack.encode(trace), head=b"memwall.trace/3\n")
    assert refusal(target) == (
        f"{target} is a trace of version 3, this memwall reads version 2; upgrade torch-memwall, or record it again"
    )


def test_an_older_version(trace: Trace, tmp_path: Path) -> None:
    """GIVEN a trace from before a change of its fields THEN the reason is its age, and not a field."""
    fields = fields_of(trace) | {"a_field_of_old": 1}
    target = written(tmp_path / "older", msgspec.msgpack.encode(fields), head=b"memwall.trace/1\n")
    assert refusal(target) == (
        f"{target} is a trace of version 1, written by an earlier memwall; this one reads version 2: record it again"
    )


def test_a_misspelt_field_is_named(trace: Trace, tmp_path: Path) -> None:
    fields = fields_of(trace)
    fields["modell_fingerprint"] = fields["model_fingerprint"]
    target = written(tmp_path / "misspelt", msgspec.msgpack.encode(fields))
    assert refusal(target) == (
        f"{target} is not a valid trace: Object contains unknown field `modell_fingerprint`; record it again"
    )


def test_a_missing_field_is_named(trace: Trace, tmp_path: Path) -> None:
    fields = fields_of(trace)
    del fields["model_fingerprint"]
    target = written(tmp_path / "missing", msgspec.msgpack.encode(fields))
    assert refusal(target) == (
        f"{target} is not a valid trace: Object missing required field `model_fingerprint`; record it again"
    )


def test_a_wrong_type_is_named_with_its_path(trace: Trace, tmp_path: Path) -> None:
    fields = fields_of(trace)
    fields["modules"][1][0] = 7
    target = written(tmp_path / "typed", msgspec.msgpack.encode(fields))
    assert refusal(target) == (
        f"{target} is not a valid trace: Expected `str`, got `int` - at `$.modules[1][0]`; record it again"
    )


def test_a_misspelt_field_inside_a_step_is_named_with_its_path(trace: Trace, tmp_path: Path) -> None:
    fields = fields_of(trace)
    fields["steps"][0]["wall_secs"] = 1.0
    target = written(tmp_path / "inside", msgspec.msgpack.encode(fields))
    assert refusal(target) == (
        f"{target} is not a valid trace: Object contains unknown field `wall_secs` - at `$.steps[0]`; record it again"
    )


def test_what_is_no_messagepack(tmp_path: Path) -> None:
    target = written(tmp_path / "text", b"hello")
    assert refusal(target).startswith(f"{target} is not a valid trace: ")


def test_a_header_that_claims_more_than_there_is_takes_no_memory(path: Path) -> None:
    """A zstandard frame says how large it gets; a damaged or hostile one may say anything."""
    frame = bytes([0x28, 0xB5, 0x2F, 0xFD, 0xE0]) + (1 << 60).to_bytes(8, "little") + b"\x01\x00\x00"
    path.write_bytes(b"memwall.trace/2\n" + frame)
    assert refusal(path).startswith(f"{path} is cut short or damaged (")


def _changed(trace: Trace, place: str, value: Any) -> Trace:
    """Returns the trace with one number of its first step, or its own, replaced."""
    if "." not in place:
        return msgspec.structs.replace(trace, **{place: value})
    rows, field = place.split(".")
    step = trace.steps[0]
    row = msgspec.structs.replace(getattr(step, rows)[0], **{field: value})
    step = msgspec.structs.replace(step, **{rows: (row, *getattr(step, rows)[1:])})
    return msgspec.structs.replace(trace, steps=(step, *trace.steps[1:]))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("ops.name", 10**9),
        ("ops.name", -1),
        ("ops.module", 10**9),
        ("ops.seconds", float("nan")),
        ("ops.seconds", float("inf")),
        ("ops.inputs", (-1,)),
        ("ops.outputs", (10**9,)),
        ("storages.nbytes", -1),
        ("storages.line", 10**9),
        ("storages.death", 10**9),
        ("saved.storage", 10**9),
        ("calls.inputs", (10**9,)),
        ("calls.end", 10**9),
        ("base_bytes", -1),
    ],
)
def test_numbers_that_cannot_be_are_refused(place: str, value: Any, trace: Trace, tmp_path: Path) -> None:
    target = written(tmp_path / "crafted", msgspec.msgpack.encode(_changed(trace, place, value)))
    field = place.replace(".", "[...].")
    assert re.search(rf"is not a valid trace: Expected a number from .* - at `\$.*{re.escape(field)}`", refusal(target))


def test_a_name_that_is_no_text_is_refused(trace: Trace, tmp_path: Path) -> None:
    payload = msgspec.msgpack.encode(trace)
    name = trace.names[0].encode()
    target = written(tmp_path / "crafted", payload.replace(name, b"\xff" * len(name)))
    assert "is not a valid trace" in refusal(target)
