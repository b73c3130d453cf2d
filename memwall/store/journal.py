"""A checkpoint directory: one generation after the other, each of which is there as a whole or not at all.

    1  buckets are written to extents that the last generation does not use      (`pool`, `data`)
    2  the meta is written to such an extent as well
    3  the data file is synced
    4  the record is written over that of the generation before the last one
    5  the commit file is synced: the new generation is the checkpoint, the last one's extents are free

A crash during 1 to 3 leaves the last generation untouched; during 4 the new record is torn, which its checksum shows,
or complete, and then so is what it points to; after 5 the new generation is the one that is found.
"""

import errno
import logging
import os
import time
from collections.abc import Sequence

from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import ALIGNMENT_BYTES, DISK_FULL, SystemBackend, read_fully, refused, write_fully
from memwall.store.closing import Closing
from memwall.store.commit_format import (
    COMMIT_BYTES,
    COMMIT_NAME,
    DATA_NAME,
    Extent,
    Meta,
    Record,
    Superblock,
    decode_record,
    decode_superblock,
    digest_of,
    encode_meta,
    encode_record,
    encode_superblock,
    is_blank,
    record_offset,
)
from memwall.store.data_file import DataFile, open_kept
from memwall.store.directory_lock import DirectoryLock
from memwall.store.generation import Generation, Stored, blank_pages, verified
from memwall.store.transfer import DEFAULT_BLOCK_BYTES, TransferPool

_log = logging.getLogger(__name__)


class Journal(Closing):
    """Opens a directory for one run, makes it where there is none, and recovers what is in it.

    Args:
        directory: of this run alone.
        backend: the operating system, or a test's substitute for it.
        num_workers: transfer threads.
        block_bytes: the size of one write, and what each checksum covers; of a directory that has a run in it already
            only to be what it was before.
        is_read_only: whether `last` is all that is wanted: nothing in the directory, which has to be there, is created
            or changed.

    Attributes:
        last: the newest generation that can be continued from; None before the first commit.
        data: where buckets get their slots from; `pool` writes them.
        recovery_seconds: to find `last`, which reads and verifies all of it.
        record_seconds: that all commits so far took beside writing buckets: the table of contents, the record, and to
            have each on disk before what follows it.

    Raises:
        StoreError: another run is using the directory, it cannot be written to, or it holds damaged files from which
            no step can be recovered.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        backend: SystemBackend | None = None,
        num_workers: int = 2,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        is_read_only: bool = False,
    ) -> None:
        self.directory = os.fspath(directory)
        self._commit_path = os.path.join(self.directory, COMMIT_NAME)
        self._block_bytes = block_bytes
        self._superblock: Superblock | None = None
        self._records: tuple[Record, ...] = ()
        self._failure: StoreError | None = None
        self.last: Generation | None = None
        self.recovery_seconds = self.record_seconds = 0.0
        if not is_read_only:
            try:
                os.makedirs(self.directory, exist_ok=True)
            except OSError as error:
                raise refused(
                    f"--checkpoint {self.directory}: this directory cannot be made",
                    error,
                    path=self.directory,
                    advice="give another one",
                ) from error
        self._backend = backend if backend is not None else SystemBackend()
        self._lock = DirectoryLock(self.directory, is_read_only=is_read_only)
        try:
            self._fd = open_kept(self._backend, self._commit_path, is_read_only=is_read_only).fd
            try:
                data_path = os.path.join(self.directory, DATA_NAME)
                self.data = DataFile(data_path, backend=self._backend, is_read_only=is_read_only)
            except BaseException:
                self._backend.close(self._fd)
                raise
        except BaseException:
            self._lock.release()
            raise
        try:
            begin = time.perf_counter()
            self.last = self._recover()
            self.recovery_seconds = time.perf_counter() - begin
            self.data.adopt(() if self.last is None else self.last.slots)
            if self.last is not None and not is_read_only:
                # Found, it may still be in the page cache alone; what is written next takes its predecessor's place.
                self._sync_data()
                self._sync_commit()
        except BaseException:
            self.data.close()
            self._backend.close(self._fd)
            self._lock.release()
            raise
        self.pool = TransferPool(self.data, num_workers=num_workers, block_bytes=self._block_bytes)

    @property
    def fingerprint(self) -> bytes | None:
        """Says what `begin` was given by the run that made the directory; None where nothing is committed yet."""
        return None if self._superblock is None or self.last is None else self._superblock.fingerprint

    def begin(self, fingerprint: bytes) -> None:
        """Makes an empty directory that of a model. To be called before the first commit, unless there is a `last`.

        Raises:
            OffloadIOError: the files cannot be written.
        """
        found = self._superblock
        if found is not None and (found.fingerprint, found.block_bytes) == (fingerprint, self._block_bytes):
            return  # of a run that ended before its first commit
        superblock = Superblock(run_id=os.urandom(16), fingerprint=fingerprint, block_bytes=self._block_bytes)
        try:
            length_bytes = self._backend.size_bytes(self._fd)
            if length_bytes < COMMIT_BYTES:
                self._backend.reserve(self._fd, length_bytes, COMMIT_BYTES - length_bytes)
        except OSError as error:
            raise self._failed("reserving", self._commit_path, error) from error
        self._write_block(encode_superblock(superblock), 0)
        self._sync_commit()
        try:
            self._backend.sync_directory(self.directory)
            self._backend.sync_directory(os.path.dirname(os.path.abspath(self.directory)))
        except OSError as error:
            raise self._failed("syncing", self.directory, error) from error
        self._superblock = superblock

    def commit(self, step: int, buckets: Sequence[Stored], content: bytes) -> None:
        """Makes a step the one that is found from now on. All its buckets have been written, without failure.

        Slots of the generation before it that are not among its own are free then.

        Raises:
            OffloadIOError: it is not committed; the last one still is. No further commit is possible.
        """
        if self._failure is not None:
            raise StoreError(str(self._failure)) from self._failure
        if self._superblock is None:
            raise StoreError(f"the checkpoint in {self.directory} was not begun")
        begin = time.perf_counter()
        try:
            found = self._committed(self._superblock, step, tuple(buckets), content)
        except StoreError as error:
            # After a sync that failed nobody knows what is on disk, and a second one may report success for nothing.
            self._failure = error
            raise
        self.record_seconds += time.perf_counter() - begin
        for slot in () if self.last is None else self.last.slots:
            self.data.free(slot)
        self.data.publish(found.slots)
        self.last = found

    def go_back_to(self, step: int) -> Generation | None:
        """Makes the step before the last one, or none, the one to continue from; before anything is written.

        Args:
            step: of the last generation or of the one before it; 0, for none at all, where there is but one.

        Returns:
            The generation; None for step 0.

        Raises:
            StoreError: there is no such step, or it is damaged.
        """
        record = next((record for record in self._records if record.step == step), None)
        if record is None and (step or (self.last is not None and self.last.number > 1)):
            raise StoreError(f"{self.directory} has no step {step} any more")
        self.last = None if record is None else verified(self.data, record, block_bytes=self._block_bytes)
        self.data.adopt(() if self.last is None else self.last.slots)
        return self.last

    def forget(self) -> None:
        """Makes the directory an empty one again, whatever was committed; before anything is written.

        Raises:
            OffloadIOError: the files cannot be written.
        """
        for number in range(2):
            self._write_block(bytes(ALIGNMENT_BYTES), record_offset(number))
        self._sync_commit()
        self._superblock, self._records, self.last = None, (), None
        self.data.adopt(())

    def _committed(self, superblock: Superblock, step: int, buckets: tuple[Stored, ...], content: bytes) -> Generation:
        number = 1 if self.last is None else self.last.number + 1
        extents = tuple(self._extent(stored) for stored in buckets)
        meta = encode_meta(Meta(generation=number, step=step, buckets=extents, content=content))
        slot = self.data.allocate(len(meta))
        pages = blank_pages(slot.num_bytes)
        pages[: len(meta)] = meta
        self.data.write(slot, 0, pages, "the table of contents")
        self._sync_data()
        record = Record(
            run_id=superblock.run_id,
            generation=number,
            step=step,
            meta_offset=slot.offset,
            meta_bytes=len(meta),
            meta_digest=digest_of(meta),
        )
        self._write_block(encode_record(record), record_offset(number))
        self._sync_commit()
        self._check_is_there()
        return Generation(number, step, buckets, content, slot)

    def _extent(self, stored: Stored) -> Extent:
        slot, offsets = stored.slot, range(0, stored.num_bytes, self._block_bytes)
        return Extent(
            offset=slot.offset,
            num_bytes=stored.num_bytes,
            slot_bytes=slot.num_bytes,
            checksums=tuple(slot.checksums[offset] for offset in offsets),
        )

    def _check_is_there(self) -> None:
        """Checks that somebody who looks for the checkpoint finds it: a file that was deleted can be written to."""
        for path, is_there in (
            (self._commit_path, self._backend.has_name(self._fd, self._commit_path)),
            (self.data.path, self.data.has_name),
        ):
            if not is_there:
                raise OffloadIOError(
                    f"the checkpoint's file {path} is gone: it was deleted or moved while the run committed steps to "
                    "it, so that nothing could be continued from; begin again with a --checkpoint DIR that nobody "
                    "else touches",
                    path=path,
                    offset=0,
                    wanted_bytes=0,
                    got_bytes=0,
                    errno=errno.ENOENT,
                )

    def _write_block(self, block: bytes, offset: int) -> None:
        page = blank_pages(ALIGNMENT_BYTES)
        page[:] = block
        write_fully(
            self._backend, self._fd, page, offset, path=self._commit_path, label="a commit record", is_kept=True
        )

    def _sync_data(self) -> None:
        try:
            self.data.sync()
        except OSError as error:
            raise self._failed("syncing", self.data.path, error) from error

    def _sync_commit(self) -> None:
        try:
            self._backend.sync(self._fd)
        except OSError as error:
            raise self._failed("syncing", self._commit_path, error) from error

    def _failed(self, verb: str, path: str, error: OSError) -> OffloadIOError:
        reason = os.strerror(error.errno or 0)
        advice = "free space there" if error.errno in DISK_FULL else "look at the kernel log (dmesg)"
        return OffloadIOError(
            f"{verb} the checkpoint's file {path} failed: {reason} (errno {error.errno}); {advice}, and continue from "
            "the last committed step with --resume",
            path=path,
            offset=0,
            wanted_bytes=0,
            got_bytes=0,
            errno=error.errno or 0,
        )

    def _recover(self) -> Generation | None:
        """Returns the newest generation of which every byte is as it was written."""
        length_bytes, has_data = self._backend.size_bytes(self._fd), self.data.length_bytes > 0
        if length_bytes < COMMIT_BYTES:
            if has_data:
                raise StoreError(
                    f"{self._commit_path} was cut short: it has {length_bytes} of {COMMIT_BYTES} bytes; restore it "
                    "from a copy, or begin anew with another --checkpoint DIR"
                )
            return None
        blocks, problems, is_failing = self._blocks()
        records = [None if block is None else decode_record(block) for block in blocks[1:]]
        if not has_data and all(block is not None and is_blank(block) for block in blocks[1:]):
            return None  # killed while the directory was made: the data file grows after that only
        self._superblock = superblock = decode_superblock(blocks[0] or b"", self._commit_path)
        problems += [
            f"the commit record at byte {ALIGNMENT_BYTES * (number + 1)} of {self._commit_path} is damaged"
            for number, (record, block) in enumerate(zip(records, blocks[1:], strict=True))
            if block is not None and not is_blank(block) and (record is None or record.run_id != superblock.run_id)
        ]
        self._block_bytes = superblock.block_bytes
        good = [record for record in records if record is not None and record.run_id == superblock.run_id]
        self._records = tuple(good)
        for record in sorted(good, key=lambda record: record.generation, reverse=True):
            try:
                found = verified(self.data, record, block_bytes=self._block_bytes)
            except StoreError as error:
                problems.append(f"step {record.step}: {error}")
                is_failing |= isinstance(error, OffloadIOError) and error.errno > 0
                continue
            for problem in problems:
                _log.warning("%s; continuing from step %d, which is whole", problem, found.step)
            return found
        if problems:
            said = (
                f"no step can be recovered from {self.directory}: {'; '.join(problems)}; restore its files from a "
                "copy, or begin anew with another --checkpoint DIR"
            )
            if is_failing:
                raise OffloadIOError(said, path=self.directory, offset=0, wanted_bytes=0, got_bytes=0, errno=errno.EIO)
            raise StoreError(said)
        return None

    def _blocks(self) -> tuple[list[bytes | None], list[str], bool]:
        """Reads the commit file's blocks one by one, so that one that the disk has lost takes no other with it.

        Returns:
            The blocks, None for a record that cannot be read; the reasons; whether there are any.
        """
        blocks: list[bytes | None] = []
        problems: list[str] = []
        for offset in range(0, COMMIT_BYTES, ALIGNMENT_BYTES):
            page, label = blank_pages(ALIGNMENT_BYTES), "a commit record" if offset else "the first block"
            try:
                read_fully(self._backend, self._fd, page, offset, path=self._commit_path, label=label, is_kept=True)
            except OffloadIOError as error:
                if not offset:
                    raise
                blocks.append(None)
                problems.append(str(error))
            else:
                blocks.append(bytes(page))
        return blocks, problems, bool(problems)

    def close(self) -> None:
        """Ends the threads, close the files, and let the next run in."""
        self.pool.close()
        if self._fd >= 0:
            self._backend.close(self._fd)
            self._fd = -1
        self._lock.release()


def is_begun(directory: str) -> bool:
    """Returns whether a directory has a file of a checkpoint that is not empty."""
    paths = (os.path.join(directory, name) for name in (COMMIT_NAME, DATA_NAME))
    return any(os.path.lexists(path) and os.lstat(path).st_size > 0 for path in paths)


def recorded_steps(directory: str) -> tuple[int, ...]:
    """Returns the steps that a directory's records name, newest first: nothing is verified, locked or changed.

    Raises:
        StoreError: there are records, and they cannot be read; to take them for none would lose what they name.
    """
    path = os.path.join(directory, COMMIT_NAME)
    try:
        with open(path, "rb") as file:
            pages = file.read(COMMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise refused(
            f"the commit records in {path} cannot be read", error, path=path, advice="have this user read them"
        ) from error
    blocks = [pages[start : start + ALIGNMENT_BYTES] for start in range(ALIGNMENT_BYTES, COMMIT_BYTES, ALIGNMENT_BYTES)]
    records = [decode_record(block) for block in blocks if len(block) == ALIGNMENT_BYTES]
    return tuple(sorted((record.step for record in records if record is not None), reverse=True))
