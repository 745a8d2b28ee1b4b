"""What waits on a GPU like a message of NCCL for its other end."""

from __future__ import annotations

import torch

from pyrannc.capture.torch_internals.devices import compile_cuda
from pyrannc.job.exchange import CTAS_OF_MESSAGES

_THREADS = 640
"""Of a thread block of NCCL."""
_WAIT = """
extern "C" __global__ void __launch_bounds__(640) wait_for_so_long(int kilocycles) {
    const long long start = clock64();
    while (clock64() - start < 1000LL * kilocycles) {}
}
"""


class WaitingMessage:
    """Takes multiprocessors of the current GPU, as a receive does that has nothing to receive yet.

    Products of matrices have as many thread blocks as the GPU has multiprocessors, so that some of them come a second
    time round where a message has others.

    Raises:
        Exception: no kernel can be compiled here, or run.
    """

    def __init__(self) -> None:
        self._kernel = compile_cuda(_WAIT, "wait_for_so_long")
        # All that a block may have, so that no other one fits beside it.
        self._shared_bytes: int = torch.cuda.get_device_properties().shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch has no type for it
        self._kernel.set_shared_memory_config(self._shared_bytes)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
        # What cannot run does not run here already.
        self.begin(0)
        self.end()

    def begin(self, cycles: int) -> None:
        """Begins to wait for so many cycles of the GPU, beside what is started from now on."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._kernel(
            grid=(CTAS_OF_MESSAGES, 1, 1),
            block=(_THREADS, 1, 1),
            args=[max(1, cycles // 1000)],
            shared_mem=self._shared_bytes,
            stream=self._stream,
        )
        self._end.record(self._stream)

    @property
    def waits(self) -> bool:
        """True before the end."""
        return not self._end.query()  # type: ignore[no-untyped-call]  # likewise

    def end(self) -> None:
        """Waits for the end."""
        self._end.synchronize()
