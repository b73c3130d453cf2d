"""Where offloaded bytes live: pinned host memory, or files, read and written beside the computation and checked.

The path of a byte from a tensor to the disk, and back by the same layers:

- Who has the tensor has one way of keeping it away, each of which keeps another promise to those that point to it.
  `disk_tier.DiskTier` and `pinned_tier.PinnedTier` (a `StorageTier`) take the bytes of a storage that may die and give
  fresh memory back: saved activations. A `buckets.Bucket` has a few tensors of some dictionaries leave as one, with
  tensors on the meta device in their places: an optimizer's state. A `paged.PagedTensor` keeps its address while its
  pages come and go: a parameter or a gradient, which views and graphs point to; `paged.WriteBehind` bounds the memory
  that waits to be written.
- `transfer.TransferPool` queues pieces of memory, and `workers` move them in blocks with a checksum each.
- `scratch.ScratchFile` owns the file and lends slots of it; `data_file.DataFile` is one that outlives the process.
- `backend.SystemBackend` makes the system calls.

`journal.Journal` commits what lies in a data file, a step at a time.
"""
