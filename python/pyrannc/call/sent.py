"""Numbers on their way from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Sent:
    """Numbers as they are now, for the host to read later; on the host they are there at once.

    Args:
        numbers: without gradients.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._there = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda)
        self._there.copy_(numbers, non_blocking=True)
        if numbers.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
            self._event.record()

    def arrived(self) -> Tensor:
        """These numbers; waits for the device that has them."""
        if self._event is not None:
            self._event.synchronize()
        return self._there
