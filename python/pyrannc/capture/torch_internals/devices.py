"""Devices and groups of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

_ALL_DIGITS = ("none", "ieee")


class _Ends:
    """What ``destroy_process_group`` ends before the communicators."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.finalize = callback


def before_groups_end(callback: Callable[[], None]) -> None:
    """Has a function called once, when the default process group is destroyed, before its communicators are.

    NCCL waits for ever for graphs that use a communicator, when that is destroyed. Public: none.
    """
    torch.distributed.distributed_c10d._world.comms.append(_Ends(callback))


@contextmanager
def all_digits() -> Iterator[None]:
    """Products and convolutions of float32 have all of its digits inside; afterwards each switch is as it was.

    Public: the switches themselves. One at "none" reads as the one above it, and has to go on doing so: what still
    reads otherwise once that one is at "ieee" has been set itself. The older ones, which torch reads together with
    these, do not take themselves back: they leave some at "ieee" that were at "none". Where the two disagree, the older
    ones cannot be read, and stay.
    """
    backends: Any = torch.backends
    above = [backends, backends.cudnn, backends.mkldnn]
    kinds = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    kinds += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    found = [kind.fp32_precision for kind in kinds]
    products = _readable(torch.get_float32_matmul_precision)
    others = _readable(lambda: backends.cudnn.allow_tf32)
    own: list[tuple[Any, str]] = []
    for switch in (*above, *kinds):
        if switch.fp32_precision not in _ALL_DIGITS:
            own.append((switch, switch.fp32_precision))
            switch.fp32_precision = "ieee"
    if products not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    if others:
        backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if products not in (None, "highest"):
            torch.set_float32_matmul_precision(products)
        if others:
            backends.cudnn.allow_tf32 = True
        for kind, before in zip(kinds, found, strict=True):
            if before not in _ALL_DIGITS:
                kind.fp32_precision = "none"
        for switch, before in own:
            switch.fp32_precision = before
        for kind, before in zip(kinds, found, strict=True):
            for value in ("none", before):
                if kind.fp32_precision != before:
                    kind.fp32_precision = value


def _readable(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def generator_address(generator: torch.Generator) -> int:
    """The same for all Python objects of a generator, of which an operator may get another than its caller has passed.

    Public: none; a generator equals no other object.
    """
    return generator._cdata  # type: ignore[attr-defined, no-any-return]  # torch has no types for it


def order_of_attention_kernels() -> list[int]:
    """Numbers of the backends in which attention looks for one that it may use, the first one first. Public: none; they
    are set by ``torch.nn.attention.sdpa_kernel(..., set_priority=True)``."""
    return list(torch._C._get_sdp_priority_order())


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the GPU waiting until the host has queued what is measured. Public: none."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types for it


class CudaKernel(Protocol):
    """A kernel that was compiled here."""

    def __call__(
        self,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Tensor | int | float],
        shared_mem: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Starts it."""

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Lets a thread block have so much memory."""


def compile_cuda(source: str, name: str) -> CudaKernel:
    """A kernel of CUDA C++ for the current GPU. Public: none; its compiler is a part of torch's packages.

    Raises:
        Exception: it cannot be compiled, as where torch finds no CUDA toolkit (OSError).
    """
    made: CudaKernel = torch.cuda._compile_kernel(source, name)
    return made
