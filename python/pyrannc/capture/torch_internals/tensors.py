"""Tensors, their memory, and the structures that hold them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils import _python_dispatch, _pytree

DisableTorchFunction = torch._C.DisableTorchFunction
"""Real execution inside a trace does not pass the modes that it is under. Public: none for modes."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Runs torch on a tensor of a class that answers for itself, as if it were a plain one. Public: the method
``Tensor.__torch_function__``, for results of the same class only."""


def version(tensor: Tensor) -> int:
    """Grows with every change in place. Public: none."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """True for a view of another tensor, which no custom function may return to be changed in place. Public: none."""
    return tensor._is_view()


def base_of(tensor: Tensor) -> Tensor | None:
    """What a view is a view of. Public: none."""
    return tensor._base


def leads_nowhere(tensor: Tensor) -> bool:
    """True for a view made while autograd was off of what requires gradients: torch says that it does, too.

    No gradient goes through it. Public: none.
    """
    base = tensor._base
    return tensor.grad_fn is None and base is not None and base.requires_grad


pytree = _pytree
"""How torch itself opens containers: types that libraries have registered are known here. Public:
``torch.utils.pytree``, since torch 2.9, without the table of registered types."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees the storages that operators make, to measure memory on the host. Public: documented, under a private name."""


class BesideCompiler(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Another such mode, under which torch's compiler works: it would give up what it meets for the whole process.
    Public: none."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by the compiler."""
        return True


StorageWeakRef = reductions.StorageWeakRef
"""Tells whether a storage still lives, without keeping it. Public: none."""


def storage_address(storage: torch.UntypedStorage) -> int:
    """Names a storage for as long as there is a reference to it, with or without data. Public: ``data_ptr()``, which
    fake tensors lack."""
    return int(storage._cdata)


def refuse_reading(tensor: Tensor, told: str) -> None:
    """Frees a tensor's memory; whatever looks for it from now on raises RuntimeError with these words. Public: none."""
    torch._C._set_storage_data_ptr_access_error_msg(storage_address(tensor.untyped_storage()), told)


def is_dense(tensor: Tensor) -> bool:
    """True for a tensor whose elements lie side by side, in whatever order. Public: none."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def storage_users(tensor: Tensor) -> int:
    """How many tensors share the memory of this one, and what else keeps it."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


tensor_users: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # it has no types
"""How many references torch's own objects have to a tensor, such as a ``.grad``; Python's are one."""
