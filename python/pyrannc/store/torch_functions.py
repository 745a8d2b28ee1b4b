"""Functions of torch by name, and what they do to a tensor that a script calls them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def function_name(func: Any) -> str:
    """The function as torch calls it; ``shape.get`` is what reads the attribute ``shape``."""
    name: str = getattr(func, "__name__", str(func))
    access = {"__get__": "get", "__set__": "set", "__delete__": "delete"}.get(name)
    if access is None:
        return name
    of: Any = getattr(func.__self__, "fget", func.__self__)
    return f"{of.__name__}.{access}"


def named(names: str) -> frozenset[str]:
    """Names of functions, as :func:`function_name` tells them."""
    return frozenset(names.split())


OF_SHAPE = named(
    "shape.get size numel nelement dim ndim.get ndimension stride dtype.get layout.get is_floating_point is_complex "
    "is_signed is_contiguous element_size itemsize.get nbytes.get is_sparse.get is_sparse_csr.get is_quantized.get "
    "is_nested.get is_mkldnn.get is_conj is_neg is_same_size __len__ storage_offset"
)
OF_DEVICE: Mapping[str, Callable[[torch.device], Any]] = {
    "device.get": lambda device: device,
    "is_cuda.get": lambda device: device.type == "cuda",
    "is_cpu.get": lambda device: device.type == "cpu",
    "is_xpu.get": lambda device: device.type == "xpu",
    "is_mps.get": lambda device: device.type == "mps",
    "is_meta.get": lambda device: False,
    "get_device": lambda device: -1 if device.index is None else device.index,
}
OF_AUTOGRAD = named(
    "requires_grad.get requires_grad.set requires_grad_ is_leaf.get grad_fn.get _version.get is_inference "
    "retains_grad.get register_hook register_post_accumulate_grad_hook detach_ __hash__ "
    "_backward_hooks.get _post_accumulate_grad_hooks.get"
)
METADATA = OF_SHAPE | OF_DEVICE.keys() | {"requires_grad.get", "is_leaf.get", "_version.get", "__hash__"}
"""What only reads form and place of a tensor, by :func:`function_name`."""

IN_PLACE = named(
    "zero_ fill_ copy_ add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ pow_ sqrt_ rsqrt_ square_ neg_ "
    "abs_ sign_ exp_ log_ clamp_ clamp_min_ clamp_max_ clip_ lerp_ addcmul_ addcdiv_ masked_fill_ nan_to_num_ "
    "__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__ __setitem__ "
    "_foreach_zero_ _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_clamp_min_ "
    "_foreach_clamp_max_ _foreach_lerp_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_copy_"
)
EACH_BY_ITSELF = named(
    "add sub subtract rsub mul multiply div divide true_divide pow sqrt rsqrt square neg negative abs sign exp log "
    "clamp clamp_min clamp_max clip lerp addcmul addcdiv maximum minimum where masked_fill nan_to_num reciprocal "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __rdiv__ __truediv__ __rtruediv__ __pow__ __rpow__ "
    "__neg__ __abs__ __gt__ __lt__ __ge__ __le__ gt lt ge le zeros_like ones_like empty_like full_like view reshape "
    "flatten t transpose permute unsqueeze squeeze expand narrow __getitem__ T.get mT.get data.get "
    "_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_sqrt"
)
SHOW_ALL = named("data.get view t transpose permute unsqueeze squeeze T.get mT.get")
SHOW_ALL_WITHOUT_GAPS = named("reshape flatten")
SHOW_SOME = named("narrow __getitem__")
LIKE_ANOTHER = frozenset(("view_as", "reshape_as", "expand_as"))
COPIES_OF_GRADIENT = named("clone detach contiguous")
DRAWN = named("rand_like randn_like randint_like")
"""What draws a whole tensor of a form, on all ranks alike, so that their generators stay in step."""


def is_write(name: str) -> bool:
    """True for what changes its first argument in place, or assigns to it."""
    by_name = name.endswith("_") and not name.endswith("__") and not name.startswith(("_fused_", "share_", "resize_"))
    return by_name or name in IN_PLACE or name == "data.set"


def title(name: str) -> str:
    """The function as a script writes it."""
    if name.endswith(".set"):
        return f"an assignment to {name.removesuffix('.set')}"
    return name.removesuffix(".get") if "." in name else f"{name}()"
