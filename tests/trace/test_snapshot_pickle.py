"""Pickles are read without executing them: plain values arrive, and files from strangers do nothing."""

import copyreg
import os
import pickle
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memwall.errors import TraceError
from memwall.trace.snapshot.read import load_snapshot
from memwall.trace.snapshot.restricted_pickle import read_plain_pickle


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


def refused(file: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as raised:
        load_snapshot(file, **options)
    return str(raised.value).removeprefix(f"{file} ")


def test_plain_values_are_those_that_pickle_loads(file: Path) -> None:
    value = {
        "text": ["", "ä", "x" * 300, "\ud800"],
        "numbers": [0, 255, 256, 65536, -1, 2**31, 2**63, 2**64 - 1, -(2**40), 0.5, float("inf")],
        "other": [True, False, None, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, {1: "a"}],
        "many": [{"k": index} for index in range(2500)],
    }
    for protocol in (2, 3, 4, 5):
        file.write_bytes(pickle.dumps(value, protocol))
        found: Any = read_plain_pickle(file).value
        found["text"][3] = value["text"][3]
        assert found == pickle.loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize("window_bytes", [1, 7, 64, 1000])
def test_a_file_is_read_in_pieces(window_bytes: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwall.trace.snapshot.restricted_pickle._WINDOW_BYTES", window_bytes)
    value = [[f"{index}" + "x" * (index % 13), index**3, {"k": (index, index / 7)}] for index in range(3000)]
    file.write_bytes(pickle.dumps(value))
    assert read_plain_pickle(file).value == value


# -- hostile files -----------------------------------------------------------------------------------------------------


class Exploit:
    """What an attacker pickles: loading it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class ExploitWithKeywords(Exploit):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj_ex__, (subprocess.Popen, ([self.command],), {"shell": True})


def unicode(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def payloads(command: str) -> dict[str, bytes]:
    """Pickles that run `command` when Python's own unpickler loads them, and others that would do harm otherwise."""
    argument = unicode(command)
    in_a_snapshot = {"segments": [], "device_traces": [[Exploit(command)]]}
    return {
        "reduce": pickle.dumps(Exploit(command)),
        "reduce_protocol_2": pickle.dumps(Exploit(command), 2),
        "newobj_ex": pickle.dumps(ExploitWithKeywords(command), 4),
        "deep_in_a_snapshot": pickle.dumps(in_a_snapshot),
        "global_reduce": b"\x80\x02cos\nsystem\n" + argument + b"\x85R.",
        "global_protocol_0": b"cos\nsystem\n(V" + command.encode() + b"\ntR.",
        "stack_global": b"\x80\x04" + unicode("os") + unicode("system") + b"\x93" + argument + b"\x85R.",
        "inst": b"\x80\x02(V" + command.encode() + b"\nios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\n" + argument + b"o.",
        "newobj": b"\x80\x02csubprocess\nPopen\n(]" + argument + b"at\x81.",
        "build": b"\x80\x02}cbuiltins\neval\n" + argument + b"b.",
        "ext1": b"\x80\x02\x82\x01.",
        "ext2": b"\x80\x02\x83\x01\x00.",
        "ext4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "persistent_id": b"\x80\x02Pos.system\n.",
        "binary_persistent_id": b"\x80\x02" + argument + b"Q.",
        "after_a_good_value": b"\x80\x04}0" + pickle.dumps(Exploit(command))[2:],
        "reduce_without_import": b"\x80\x02" + argument + argument + b"\x85R.",
    }


def runs_in_pickle(payload: bytes) -> None:
    """Loads a payload the way a careless program does, in a process of its own."""
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", code], input=payload, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("name", list(payloads("")))
def test_nothing_in_a_file_is_executed(name: str, file: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload = payloads(f"touch {canary}")[name]
    file.write_bytes(payload)
    message = refused(file)
    assert not canary.exists()
    if name != "global_protocol_0":
        assert "is no memory snapshot: the pickle instruction " in message
        assert "nothing of the file was executed" in message


@pytest.mark.parametrize("name", ["reduce", "global_reduce", "global_protocol_0", "stack_global", "inst", "obj"])
def test_the_payloads_are_real(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    runs_in_pickle(payloads(f"touch {canary}")[name])
    assert canary.exists()


def test_a_class_that_copyreg_already_knows_is_not_built(file: Path) -> None:
    copyreg.add_extension("os", "system", 240)
    copyreg._extension_cache[240] = os.system  # type: ignore[attr-defined]
    try:
        file.write_bytes(b"\x80\x02\x82\xf0" + unicode("false") + b"\x85R.")
        assert "the pickle instruction EXT1 at byte 2" in refused(file)
    finally:
        copyreg.remove_extension("os", "system", 240)
        copyreg._extension_cache.pop(240, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Lengths that are not there, or that nobody can want.
        (b"\x80\x04\x95" + b"\xff" * 8, "18446744073709551615 bytes are announced at byte 11, 0 are there"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x", "a text of 4611686018427387904 bytes"),
        (b"\x80\x04X" + struct.pack("<I", 1 << 20) + b"x", "1048576 bytes are announced at byte 7, 1 are there"),
        (b"\x80\x04\x8b" + struct.pack("<i", 1 << 30), "the pickle instruction LONG4"),
        (b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".", "an integer of 255 bytes"),
        (b"\x80\x02L" + b"9" * 100_000 + b"L\n.", "the pickle instruction LONG"),
        # Memo numbers that would make CPython's unpickler take gigabytes.
        (b"\x80\x04Nr" + struct.pack("<I", 0x7FFFFFFF) + b".", "value 2147483647 is remembered after 0"),
        (b"\x80\x04j" + struct.pack("<I", 5) + b".", "an instruction finds nothing to work on"),
        # A stack that does not add up.
        (b"\x80\x04.", "it ends in the middle of a value"),
        (b"\x80\x04NN.", "it ends in the middle of a value"),
        (b"\x80\x04(N.", "it ends in the middle of a value"),
        (b"\x80\x04t.", "an instruction finds nothing to work on"),
        (b"\x80\x04a.", "an instruction finds nothing to work on"),
        (b"\x80\x04N\x87.", "an instruction finds nothing to work on"),
        (b"\x80\x04NNa.", "an element is added to a NoneType"),
        (b"\x80\x04]NNs.", "a key is set in a list"),
        (b"\x80\x04}(Nu.", "a key is set in a dict"),
        (b"\x80\x04}NNs.", "a key that is a NoneType"),
        (b"\x80\x04}]Ns.", "a key that is a list"),
        (b"\x80\x04" + b"(" * 200 + b".", "more than 100 values inside each other"),
        (b"\x80\x04\x80\x00.", "pickle protocol 0"),
    ],
)
def test_what_would_take_memory_or_crash_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    assert message in refused(file)


def nested_tuple_as_key() -> bytes:
    """Hashing it ends a Python process: the hash of a tuple goes into its elements without a limit."""
    return b"\x80\x04})" + b"\x85" * 300_000 + b"Ns."


def nested_lists() -> bytes:
    return b"\x80\x04]" + b"]\x94" * 200_000 + b"a" * 200_000 + b"."


def same_segment_a_million_times() -> bytes:
    """A square of references: small in the file, without end for a reader that walks it."""
    block = b"}(" + unicode("size") + b"K\x00" + unicode("state") + unicode("inactive") + b"u\x94"
    blocks = b"](" + block + b"h\x00" * 20_000 + b"e\x94"
    segment = b"}(" + unicode("address") + b"K\x00" + unicode("total_size") + b"K\x00" + unicode("blocks") + blocks
    segments = b"](" + segment + b"u\x94" + b"h\x02" * 20_000 + b"e"
    return b"\x80\x04}(" + unicode("segments") + segments + b"u."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nested_tuple_as_key, "a key that is a tuple"),
        (nested_lists, "at $.segments"),
        (same_segment_a_million_times, "expected values of their own, found the same ones used again and again"),
    ],
)
def test_nested_and_repeated_values(make: Callable[[], bytes], message: str, file: Path) -> None:
    file.write_bytes(make())
    begin = time.process_time()
    assert message in refused(file)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("content", [b"}" * 2_000, b"]\x94" * 2_000, b"(" + b"K\x01" * 4_000, b"\x8c\x01x" * 2_000])
def test_values_are_counted_against_the_limit(file: Path, content: bytes) -> None:
    file.write_bytes(b"\x80\x04" + content + b".")
    message = refused(file, memory_limit_bytes=100_000)
    assert re.match(r"holds more than the 0 MiB of values that are read at most; record a shorter history", message)
