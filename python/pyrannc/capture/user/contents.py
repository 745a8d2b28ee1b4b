"""What is in a tensor, as bytes."""

import ctypes

from torch import Tensor


def contents(tensor: Tensor) -> bytes:
    """The elements one after another. Without NumPy, which torch does not need; those of a GPU are waited for."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
