"""What wrapped models compute on a device goes on in the order of the script, on whatever streams it calls them.

From call to call a model has memory in common, such as that of recorded runs, and with other models communicators, on
which all ranks must come in one order.
"""

from __future__ import annotations

import torch

_last: dict[torch.device, torch.cuda.Stream] = {}
"""By devices, the stream on which something was computed last."""


def follow_the_last(device: torch.device) -> None:
    """Makes the current stream wait for what was computed before on another one."""
    if device.type != "cuda":
        return
    stream, before = torch.cuda.current_stream(device), _last.get(device)
    if before is not None and before != stream and _may_wait(stream, before):
        stream.wait_stream(before)
    _last[device] = stream


def _may_wait(stream: torch.cuda.Stream, before: torch.cuda.Stream) -> bool:
    """False where a graph that a script records would wait for what is not in it, and had ended before it began."""
    return _is_recorded(before) or not _is_recorded(stream)


def _is_recorded(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
