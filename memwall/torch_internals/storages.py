"""Tells storages by identity and by who refers to them, and the parts of sparse tensors."""

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memwall.torch_internals.names import attribute, function, kind, method

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
else:
    StorageWeakRef = kind("torch.multiprocessing.reductions.StorageWeakRef", "knowing that a storage still lives")
    """A reference that keeps a storage's identity, but not its bytes; without it nothing is offloaded."""

weak_tensor_dict: Callable[[], MutableMapping[Tensor, Any]] = function(
    "torch.utils.weak.WeakTensorKeyDictionary", "gradients on disk while a step is recorded"
)
"""Returns a dict by tensors' identity, which forgets those that died.

Raises NotAvailableError without it: no step is recorded while gradients go to disk.
"""

identity_of: Callable[[torch.UntypedStorage], int] = attribute(
    "torch.UntypedStorage._cdata", "telling storages from each other"
)
"""Returns what tells a storage from all others while it lives, also one without bytes, as fake ones.

Raises NotAvailableError without it: no step can be recorded.
"""

_use_count = function("torch._C._storage_Use_Count", "parameters on disk, whose other holders must be known,")


def num_references(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors, and other objects, hold a storage; this call's own reference among them.

    Raises:
        NotAvailableError: this torch does not tell; parameters cannot be streamed from disk then.
    """
    return int(_use_count(identity_of(storage)))


sparse_indices: Callable[[Tensor], Tensor] = method("torch.Tensor._indices", "gradients of sparse embeddings")
"""Returns the indices [dimensions, entries] of a sparse tensor, also of one that has not been summed up (coalesced)."""

sparse_values: Callable[[Tensor], Tensor] = method("torch.Tensor._values", "gradients of sparse embeddings")
"""Returns the values [entries, ...] of a sparse tensor, also of one that has not been summed up (coalesced)."""

sparse_nnz: Callable[[Tensor], int] = method("torch.Tensor._nnz", "gradients of sparse embeddings")
"""Returns the number of entries of a sparse tensor."""


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns what holds a tensor's bytes: a sparse one has no storage of its own, and no `nbytes`."""
    if tensor.layout is torch.strided:
        return (tensor,)
    return (sparse_indices(tensor), sparse_values(tensor)) if tensor.layout is torch.sparse_coo else ()
