"""Each direction between two ranks has a communicator of its own on NCCL, which takes few thread blocks of a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pyrannc.job import process
from pyrannc.runtime.channels import Channels
from tests.gpu.loops import LOOPS, train
from tests.ranks import run_ranks

NUMEL = 1 << 24
"""Of a message that NCCL does not take before its receiver is there."""


def _join(bound: bool) -> torch.device:
    """Joins the other rank as scripts do, with a group that is bound to the device or not."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device if bound else None)
    return process.ensure_process_group().device


def _cross(bound: bool) -> tuple[float, list[dict[str, Any]]]:
    """A message that nobody waits for yet does not hold up another the other way; what came, and the kernels."""
    device = _join(bound)
    channels = Channels(device)
    channels.open([(0, 1), (1, 0)])
    own, peer = dist.get_rank(), 1 - dist.get_rank()
    sent = torch.full((NUMEL,), float(own), device=device)
    came = torch.empty_like(sent)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        channels.send(peer, [sent], microbatch=0, window=None)
        if own == 1:
            # The other one has its message already.
            process.barrier()
        channels.receive(peer, came).wait()
        torch.cuda.current_stream().synchronize()
        if own == 0:
            process.barrier()
        channels.finish()
        torch.cuda.synchronize()
    channels.close()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return float(came.mean()), [event["args"] for event in events if "ncclDevKernel_SendRecv" in event["name"]]


def _trained(bound: bool) -> list[float]:
    _join(bound)
    return train(LOOPS["Stages, loss inside"], 6, "auto").losses


@pytest.mark.parametrize("bound", [False, True])
def test_directions_do_not_wait_for_each_other(bound: bool) -> None:
    for rank, (came, kernels) in enumerate(run_ranks(2, _cross, bound, timeout_s=60)):
        assert came == 1 - rank
        assert len(kernels) == len({kernel["stream"] for kernel in kernels}) == 2
        assert all(kernel["grid"][0] <= 4 for kernel in kernels)


def test_a_group_that_is_bound_to_its_device_trains_alike() -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off", "RANNC_CUDA_GRAPHS": "auto"}
    env |= LOOPS["Stages, loss inside"].env
    job: Callable[[bool], list[float]] = _trained
    assert run_ranks(2, job, True, env=env) == run_ranks(2, job, False, env=env)
