"""CUDA graphs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from pyrannc.capture.torch_internals.memsets import memsets_to_kernels


class Graph(torch.cuda.CUDAGraph):
    """A CUDA graph whose recording leaves torch as it was when it fails.

    Where what was recorded turns out to be none (an operator has waited for the device), torch goes on giving memory
    from the graph's pool, and its generator goes on drawing as in a recording: both end only behind the call that
    fails. Small memsets in it become kernels. Public: the graph itself.
    """

    def __init__(self) -> None:
        super().__init__(keep_graph=True)  # type: ignore[call-arg]  # torch types it as that of an object

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begins a recording, into a pool of its own if none is given.

        Raises:
            Exception: it cannot be begun.
        """
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_get_state()
        try:
            super().capture_begin(pool=self._pool, capture_error_mode=capture_error_mode)
        except Exception:
            self._clean_up()
            raise

    def capture_end(self) -> None:
        """Ends it.

        Raises:
            Exception: what was recorded cannot be replayed.
        """
        try:
            super().capture_end()
            memsets_to_kernels(self)
            self.instantiate()
        except Exception:
            self._clean_up()
            raise

    def _clean_up(self) -> None:
        device = torch.cuda.current_device()
        try:
            torch._C._cuda_endAllocateToPool(device, self._pool)
        except RuntimeError:
            # torch had come to that itself, and gives the pool back with the graph.
            pass
        else:
            torch._C._cuda_releasePool(device, self._pool)
        # The end of any other recording ends the generator's too. Where that fails as well, the first error counts.
        with suppress(RuntimeError):
            nothing, other = torch.zeros((), device=torch.device("cuda", device)), torch.cuda.CUDAGraph()
            other.register_generator_state(self._generator)
            other.capture_begin(capture_error_mode="thread_local")
            nothing.zero_()
            other.capture_end()
