"""The files of a checkpoint directory: of one run at a time, never somebody else's, and not changed by reading."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from journals import found_step, get, put, refusal

from memwall.errors import OffloadIOError
from memwall.store.directory_lock import DirectoryLock
from memwall.store.journal import Journal


def test_a_second_run_in_the_same_directory_is_refused(store: Path) -> None:
    code = f"from memwall.store.journal import Journal\nJournal({os.fspath(store)!r})"
    with Journal(store):
        assert refusal(store) == (
            f"--checkpoint {store} is in use by this process; wait until that run has ended, or give this one a "
            "directory of its own"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"--checkpoint {store} is in use by process {os.getpid()} on " in done.stderr
    assert found_step(store) == 3


def test_a_child_that_lives_on_does_not_keep_a_killed_run_from_being_resumed(store: Path) -> None:
    code = (
        "import os, time\nfrom memwall.store.journal import Journal\n"
        f"journal = Journal({os.fspath(store)!r})\n"
        "if os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        process.wait()
        assert found_step(store) == 3
    finally:
        os.killpg(process.pid, 9)
        process.stdout.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_without_room_for_the_lock_s_words_keeps_no_run_from_going_on(
    store: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        lock = DirectoryLock(os.fspath(store))
    lock.release()
    assert found_step(store) == 3


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def second_name(path: Path, target: Path) -> None:
    path.hardlink_to(target)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [(link, "is a symbolic link"), (second_name, "is one of 2 names of a file"), (pipe, "is not a regular file")],
)
@pytest.mark.parametrize("name", ["memwall.lock", "memwall.commit", "memwall.data"])
def test_what_somebody_planted_under_a_file_s_name_is_not_written_through(
    name: str, plant: Callable[[Path, Path], None], reason: str, tmp_path: Path
) -> None:
    target = tmp_path / "precious"
    target.write_text("not memwall's")
    (tmp_path / "run").mkdir()
    plant(tmp_path / "run" / name, target)
    assert refusal(tmp_path / "run").startswith(f"{tmp_path}/run/{name} {reason}")
    assert target.read_text() == "not memwall's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("name", ["memwall.lock", "memwall.commit", "memwall.data"])
def test_a_file_of_another_user_is_not_written_to_unless_the_directory_is_theirs(name: str, store: Path) -> None:
    os.chown(store / name, 12345, -1)
    assert refusal(store).startswith(f"{store / name} belongs to another user (id 12345)")
    os.chown(store, 12345, -1)
    assert found_step(store) == 3


def state_of(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Of a directory and of what is in it: its length, and when its contents and anything about it last changed."""
    found = {path.name: path.lstat() for path in (directory, *directory.iterdir())}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found.items()}


@pytest.mark.parametrize("has_lock", [True, False])
def test_reading_changes_nothing(store: Path, has_lock: bool) -> None:
    if not has_lock:
        (store / "memwall.lock").unlink()
    before = state_of(store)
    with Journal(store, is_read_only=True) as journal:
        assert journal.last is not None
        assert [get(journal, stored) for stored in journal.last.buckets] == [{3}, {200}]
    assert state_of(store) == before
    assert found_step(store) == 3


def test_a_run_and_a_reader_keep_each_other_out(store: Path) -> None:
    code = (
        "import sys\nfrom memwall.store.journal import Journal\n"
        f"Journal({os.fspath(store)!r}, is_read_only=len(sys.argv) > 1)"
    )

    def problem(*arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr

    with Journal(store):
        assert "is in use by process" in problem("reads")
    with Journal(store, is_read_only=True):
        assert "is in use by" in problem()
        assert problem("reads") == ""


@pytest.mark.parametrize("name", ["memwall.data", "memwall.commit"])
def test_a_file_that_was_deleted_or_replaced_is_noticed_at_the_next_commit(store: Path, name: str) -> None:
    with Journal(store) as journal:
        (store / name).unlink()
        with pytest.raises(OffloadIOError, match=f"{name} is gone: it was deleted or moved while the run") as error:
            journal.commit(4, [put(journal, 4)], b"4")
    assert error.value.exit_status == 6
    with Journal(store.parent / "other") as journal:
        journal.begin(b"f" * 16)
        (store.parent / "other" / name).rename(store / "moved")
        (store.parent / "other" / name).write_bytes(b"")
        with pytest.raises(OffloadIOError, match=f"{name} is gone"):
            journal.commit(1, [put(journal, 1)], b"1")


@pytest.mark.parametrize("name", ["memwall.lock", "memwall.commit", "memwall.data"])
def test_a_disk_that_fails_when_a_file_is_opened_is_no_bad_input(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = os.open

    def fails(path: str, *args: int, **options: int) -> int:
        if os.fspath(path).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails)
        with pytest.raises(OffloadIOError) as caught:
            Journal(store)
    assert (caught.value.exit_status, caught.value.errno) == (6, errno.EIO)
    assert name in str(caught.value)
    assert str(caught.value).endswith(
        "cannot be opened"
        + (" there" if name == "memwall.lock" else "")
        + ": Input/output error (errno 5); the disk or its driver reports an error: look at the kernel log (dmesg)"
    )
    assert found_step(store) == 3


def test_a_disk_that_fails_when_the_directory_is_made_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "makedirs", fails)
    with pytest.raises(OffloadIOError, match="this directory cannot be made: Input/output error"):
        Journal(tmp_path / "run")
