"""Faults of what carries a plan out: `memwall/apply`, `memwall/store` and `memwall/patches.py`."""

from mutations.mutation import Mutation

JOURNAL = "memwall/store/journal.py"
GENERATION = "memwall/store/generation.py"
HIDDEN = "memwall/apply/blocks/hidden_state.py"
ENGINE = "memwall/apply/offload/engine.py"
PATCHES = "memwall/patches.py"

EXECUTION = (
    Mutation(
        "a block that two plans recompute is not proven under the second one",
        "memwall/apply/blocks/recomputed.py",
        "        if self._is_proven:\n",
        "        if self._is_proven or vars(self._module).setdefault('proven_by', self) is not self:\n",
        ("tests/apply/test_proofs_again.py",),
    ),
    Mutation(
        "a checkpoint is written through a hard link, into somebody else's file",
        "memwall/store/own_file.py",
        "if found.st_nlink > 1:",
        "if found.st_nlink > 9:",
        ("tests/store/test_journal_files.py",),
    ),
    Mutation(
        "a commit's record may reach the disk before what it points to",
        JOURNAL,
        "        self._sync_data()\n        record = Record(",
        "        record = Record(",
        ("tests/store/test_journal_crashes.py", "tests/store/test_journal.py"),
    ),
    Mutation(
        "a commit is over before its record is on disk",
        JOURNAL,
        "        self._sync_commit()\n        self._check_is_there()\n        return Generation(",
        "        self._check_is_there()\n        return Generation(",
        ("tests/store/test_journal_crashes.py", "tests/store/test_journal.py"),
    ),
    Mutation(
        "a run continues from a damaged table of contents",
        GENERATION,
        "if digest_of(contents) != record.meta_digest:",
        "if False:",
        ("tests/store/test_journal.py",),
    ),
    Mutation(
        "a run continues from a damaged bucket",
        GENERATION,
        "if crc32(block) != checksum:",
        "if False:",
        ("tests/store/test_journal.py",),
    ),
    Mutation(
        "bytes that came back different from disk are trained on",
        "memwall/store/workers.py",
        "if transfer.slot.checksums.get(slot_offset) != crc32(view):",
        "if False:",
        ("tests/store/test_transfer.py",),
    ),
    Mutation(
        "undoing takes back what somebody else has changed since",
        PATCHES,
        "elif self.slot.has(self.value):",
        "elif self.slot.is_there:",
        ("tests/test_patches.py",),
    ),
    Mutation(
        "changes are taken back in the order in which they were made",
        PATCHES,
        "for undo in reversed(undos):",
        "for undo in undos:",
        ("tests/test_patches.py",),
    ),
    Mutation(
        "parameters that autograd saves are offloaded like activations",
        "memwall/apply/offload/parking.py",
        "return identity_of(storage) in known or storage.data_ptr() in addresses or gathered.holds(tensor)",
        "return False",
        ("tests/apply/test_parking.py",),
    ),
    Mutation(
        "a storage that was written between two saves comes back as it was at the first",
        ENGINE,
        "place = (identity_of(storage), storage.data_ptr(), start, end, version_of(tensor))",
        "place = (identity_of(storage), storage.data_ptr(), start, end, 0)",
        ("tests/apply/test_offload.py", "tests/apply/test_offload_writes.py"),
    ),
    Mutation(
        "a recomputed block draws other numbers from numpy's generator than its forward did",
        HIDDEN,
        "        if self._numpy is not None:\n            set_numpy_state(self._numpy)",
        "        pass",
        ("tests/apply/recompute/test_hidden_state.py",),
    ),
    Mutation(
        "what a block collects in a list is there twice after backward",
        HIDDEN,
        "            refill(live, copied)",
        "            pass",
        ("tests/apply/recompute/test_hidden_state.py",),
    ),
    Mutation(
        "a block is recomputed although a second run of it differs",
        "memwall/apply/blocks/recomputed.py",
        "found = difference(saved, second.taken) or difference(before, after)",
        'found = ""',
        ("tests/apply/recompute/test_unrepeatable.py",),
    ),
    Mutation(
        "a block that adds to gradients itself does so once more in a second run",
        "memwall/apply/blocks/recomputed.py",
        "        if added.are_there:\n            if first.lacked_bytes:",
        "        if False:\n            if first.lacked_bytes:",
        ("tests/apply/test_proofs.py",),
    ),
    Mutation(
        "state is read into a buffer that is still being written to disk",
        "memwall/apply/optimizer_state/ring.py",
        "later.bucket.begin_read(buffer, after=share.bucket.write)",
        "later.bucket.begin_read(buffer)",
        ("tests/apply/optimizer_state/test_bucketed_state.py", "tests/apply/optimizer_state/test_pinned.py"),
    ),
    Mutation(
        "parts of a batch weigh the same, however many labels count in them",
        "memwall/apply/microbatch.py",
        "self._weight = self.num_terms(micro, count) / total",
        "self._weight = 1 / len(begins)",
        ("tests/session/test_micro_batches.py::test_accumulation_gives_the_gradient_of_the_undivided_batch",),
    ),
    Mutation(
        "DDP's first buckets are never trimmed, though new ones were made",
        "memwall/apply/memory/ddp_buckets.py",
        "if not waits_for_new_buckets(parallel):",
        "if False:",
        ("tests/apply/test_ddp_buckets.py",),
    ),
    Mutation(
        "a recomputed block draws other numbers from Python's generator than its forward did",
        HIDDEN,
        "            random.setstate(self._python)",
        "            pass",
        ("tests/apply/recompute/test_hidden_state.py",),
    ),
    Mutation(
        "a block is proven by a second run in forward that the budget has no room for",
        "memwall/apply/blocks/digests.py",
        "if room_bytes is not None and room_bytes < num_bytes:",
        "if False:",
        ("tests/apply/test_proofs.py",),
    ),
    Mutation(
        "one of several ranks has no room to prove a block, and lacks in the block's collective",
        "memwall/apply/technique.py",
        "if num_processes() > 1:",
        "if False:",
        ("tests/apply/test_proofs.py",),
    ),
    Mutation(
        "a run of layers goes on with a layer that the script has put another one in place of",
        "memwall/apply/blocks/sequences.py",
        "is_same = all(layers.get(name) is layer for name, layer in held)",
        "is_same = True",
        ("tests/apply/test_sequences.py",),
    ),
)
