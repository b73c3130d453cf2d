"""Faults that the project has had, each as a change of one place that brings it back, and the tests that find it."""

from typing import NamedTuple

__all__ = ["MUTATIONS", "Mutation"]


class Mutation(NamedTuple):
    """Names a fault, the text in a file that keeps it away, what stands there with the fault, and who notices.

    The text occurs once in its file. Tests are what pytest takes: files, or names in them.
    """

    fault: str
    path: str
    text: str
    faulty: str
    tests: tuple[str, ...]


JOURNAL = "memwall/store/journal.py"
GENERATION = "memwall/store/generation.py"
HIDDEN = "memwall/apply/blocks/hidden_state.py"
ENGINE = "memwall/apply/offload/engine.py"
PATCHES = "memwall/patches.py"

MUTATIONS = (
    Mutation(
        "the actions of a plan that is made again do not prove themselves",
        "memwall/session/plan_in_effect.py",
        "        applied.apply()\n",
        "        applied.apply()\n        applied._num_steps = 2 * (self.num_changes > 0)\n",
        ("tests/apply/test_proofs.py",),
    ),
    Mutation(
        "the records of a step are made while pages that its tensors have left are resident",
        "memwall/session/recorded_step.py",
        "self._allocator.trim()  # first: the records",
        "# first: the records",
        ("tests/session/test_end_of_recording.py",),
    ),
    Mutation(
        "the state of an optimizer that the script has let go stays, and keeps parameters off the disk",
        "memwall/session/steps.py",
        "            self.borders.let_go_optimizers()\n",
        "",
        ("tests/session/test_stages.py",),
    ),
    Mutation(
        "a step by torch.func is judged while it runs, and a budget is told that does not hold",
        "memwall/session/unseen_steps.py",
        "elif not self._is_over(num_optimizer_steps):",
        "elif False:",
        ("tests/session/test_unseen_steps.py",),
    ),
    Mutation(
        "a first step that is left alone keeps all that it saves, and may pass its budget",
        "memwall/integrations/scripts/late_parking.py",
        "(self._engine is None and process_bytes() <= self._most_bytes)",
        "self._engine is None",
        ("tests/integrations/test_ample_room.py",),
    ),
    Mutation(
        "a run that was left alone, and grows, is never planned for",
        "memwall/integrations/scripts/ample_room.py",
        "        if self._is_passed:\n            self._listen()",
        "        if False:\n            self._listen()",
        ("tests/integrations/test_ample_room.py",),
    ),
    Mutation(
        "a size that is needed is shown rounded down, and typed as shown it is too little",
        "memwall/units.py",
        'last_digits = -(-parts // scale) if rounding == "up" else parts // scale',
        "last_digits = parts // scale",
        ("tests/test_units.py",),
    ),
    Mutation(
        "each rank of a host takes a percentage of all its memory",
        "memwall/machine/limits.py",
        "return total_bytes // num_local_ranks()",
        "return total_bytes",
        ("tests/machine/test_limits.py",),
    ),
    Mutation(
        "each rank plans with all of the disk",
        "memwall/machine/disk_probe.py",
        "usage.free // num_local_ranks()",
        "usage.free",
        ("tests/cli/test_host.py",),
    ),
    Mutation(
        "a complete run over its budget fails the job of its launcher",
        "memwall/cli/running/run_end.py",
        "    if not here.by_launcher:\n        return 5",
        "    return 5",
        ("tests/cli/test_run_status.py",),
    ),
    Mutation(
        "a trace whose modules are each other's parents is read, and never left",
        "memwall/trace/file.py",
        "if not -1 <= module.parent < index:",
        "if not -1 <= module.parent:",
        ("tests/trace/test_file.py",),
    ),
    Mutation(
        "a small trace that claims to be huge gets the memory that it claims",
        "memwall/trace/file.py",
        "if size_bytes > max(_SMALL_BYTES, _LARGEST_RATIO * len(payload)):",
        "if size_bytes < 0:",
        ("tests/trace/test_file.py",),
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
        "return tensor.untyped_storage().data_ptr() in addresses",
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
        "a saved tensor that was written in place is used in backward",
        "memwall/torch_internals/saved.py",
        "if saved.was_modified():",
        "if False:",
        ("tests/apply/test_offload_writes.py", "tests/integrations/test_ample_room.py"),
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
        "a storage is not counted in the operation that frees it",
        "memwall/predict/curve.py",
        "end = storage.death if storage.death < num_ops else num_ops",
        "end = storage.death - 1 if storage.death < num_ops else num_ops",
        ("tests/trace/test_fidelity.py",),
    ),
    Mutation(
        "parts of a batch weigh the same, however many labels count in them",
        "memwall/apply/microbatch.py",
        "self._weight = self.num_terms(micro, count) / total",
        "self._weight = 1 / len(begins)",
        ("tests/session/test_micro_batches.py::test_accumulation_gives_the_gradient_of_the_undivided_batch",),
    ),
    Mutation(
        "rows that no label counts in get what was in memory for a gradient",
        "triton_kernels/linear_cross_entropy/_chunks.py",
        "    if rows is not None:\n        gradients.x.zero_()\n",
        "",
        ("tests/kernels/test_linear_cross_entropy.py", "tests/kernels/test_recurring_bugs.py"),
    ),
    Mutation(
        "a plan uses its margin up",
        "memwall/planning/one_recording/search_inputs.py",
        "return budget_bytes - (self.process.margin_bytes(budget_bytes) if has_margin else 0)",
        "return budget_bytes",
        ("tests/planning/test_search.py::test_what_is_forecast_is_the_step_that_the_actions_make",),
    ),
    Mutation(
        "DDP's first buckets are never trimmed, though new ones were made",
        "memwall/apply/memory/ddp_buckets.py",
        "if not waits_for_new_buckets(parallel):",
        "if False:",
        ("tests/apply/test_ddp_buckets.py",),
    ),
    Mutation(
        "somebody's class that is called as one of torch's is taken for it",
        "memwall/trace/optimizers.py",
        "base.__name__ in _CLASSES and _is_at_home(base)",
        "base.__name__ in _CLASSES",
        ("tests/trace/test_optimizers.py",),
    ),
    Mutation(
        "a recomputed block draws other numbers from Python's generator than its forward did",
        HIDDEN,
        "            random.setstate(self._python)",
        "            pass",
        ("tests/apply/recompute/test_hidden_state.py",),
    ),
    Mutation(
        "processes of one host pin all of its memory each",
        "memwall/machine/limits.py",
        "return free_memory_bytes(root=root) * tenths // 10 // num_local_ranks()",
        "return free_memory_bytes(root=root) * tenths // 10",
        ("tests/machine/test_limits.py",),
    ),
    Mutation(
        "a plan's allocator setting may end in a line of its own for a shell",
        "memwall/predict/cuda_allocator/allocator_settings.py",
        "_WELL_FORMED.fullmatch(text)",
        "_WELL_FORMED.match(text)",
        ("tests/cli/test_export.py", "tests/predict/cuda_allocator/test_allocator_settings.py"),
    ),
    Mutation(
        "an instruction of a snapshot's pickle that would run code is passed over",
        "memwall/trace/snapshot/restricted_pickle.py",
        "                    raise self._refusal(code)",
        "                    continue",
        ("tests/trace/test_snapshot_pickle.py",),
    ),
    Mutation(
        "what a solver's library prints stands in the output of a command",
        "memwall/planning/solver/quiet_streams.py",
        "                os.dup2(nowhere, _STANDARD_OUTPUT)",
        "                pass",
        ("tests/planning/test_solve.py::test_a_solver_that_prints_as_it_is_made_is_not_heard",),
    ),
    Mutation(
        "a budget whose bound says that no plan for it is of use is solved with integers",
        "memwall/planning/solver/milp.py",
        "    if (near.bound - program.ties) * unit_seconds >= below_seconds:",
        "    if False:",
        ("tests/planning/test_solve.py::test_what_a_bound_says_is_of_no_use_is_not_looked_for",),
    ),
    Mutation(
        "the forecast of ZeRO-3 divides parameters that DeepSpeed keeps whole until they are used again",
        "memwall/predict/sharding/zero.py",
        "                rank.add(whole_bytes, start, used[again][0])",
        "                rank.add(whole_bytes, start, end)",
        ("tests/predict/sharding/test_kinds.py::test_stage_3_keeps_what_is_used_again_soon_between_its_uses",),
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
        "room between steps goes after the first ones, where leaving it costs next to nothing",
        "memwall/session/watch/room.py",
        "return asked_bytes if is_cheap or is_learning else",
        "return asked_bytes if is_learning else",
        ("tests/session/watch/test_room.py",),
    ),
    Mutation(
        "the window of offloads holds sources that have left, and never waits for one",
        "memwall/predict/offload_window.py",
        "while leaving_bytes > (window_bytes if holds_sources else 0):",
        "while False:",
        ("tests/predict/test_offload_window.py",),
    ),
    Mutation(
        "a session that closes takes the peaks of another one's device with it",
        "memwall/machine/device_peaks.py",
        "        if not self._num_users:",
        "        if True:",
        ("tests/machine/test_device_peaks.py",),
    ),
    Mutation(
        "a loader that is trained from in parts is taken for one of an evaluation",
        "memwall/session/loop/evaluation_batch.py",
        "if id(sampler) not in held",
        "if True",
        ("tests/session/test_evaluation_batch.py",),
    ),
    Mutation(
        "a block's collective runs again on some ranks and not on those that have another plan",
        "memwall/session/ranks/figures.py",
        "told_apart = () if _has_collective(trace) else tuple(trained)",
        "told_apart = tuple(trained)",
        ("tests/session/ranks/test_unlike_ranks.py",),
    ),
    Mutation(
        "a rank whose blocks are frozen follows the plan of one that trains them",
        "memwall/session/ranks/figures.py",
        "told_apart = () if _has_collective(trace) else tuple(trained)",
        "told_apart = ()",
        ("tests/session/ranks/test_unlike_ranks.py",),
    ),
    Mutation(
        "workers of DLRover pass over a batch, since its version is the one that they have seen",
        "memwall/integrations/dlrover.py",
        "    loader.version += 1\n",
        "",
        ("tests/integrations/test_dlrover.py",),
    ),
    Mutation(
        "gradients that are averaged after backward lose the signs of zeros",
        "memwall/torch_internals/reducer.py",
        "torch.full((), -0.0,",
        "torch.full((), 0.0,",
        ("tests/torch_internals/test_names.py",),
    ),
    Mutation(
        "what a failed backward has left in a gathered parameter is added to the gradient of the step done again",
        "memwall/torch_internals/sharding.py",
        "            whole.grad = None\n",
        "            pass\n",
        ("tests/session/ranks/test_joint_parts.py",),
    ),
    Mutation(
        "a reducer holds its process group last, since the script has closed it, and waits for ever",
        "memwall/session/session.py",
        "        keep_groups(model)\n",
        "",
        ("tests/session/test_parallel.py",),
    ),
    Mutation(
        "a run of layers goes on with a layer that the script has put another one in place of",
        "memwall/apply/blocks/sequences.py",
        "is_same = all(layers.get(name) is layer for name, layer in held)",
        "is_same = True",
        ("tests/apply/test_sequences.py",),
    ),
    Mutation(
        "a run of layers begins with a layer in place, and cannot be computed again",
        "memwall/planning/layer_runs.py",
        "held_bytes >= least_bytes and not any(_writes(step, row[place], written) for row in rows)",
        "held_bytes >= least_bytes",
        ("tests/planning/test_layer_runs.py",),
    ),
)
