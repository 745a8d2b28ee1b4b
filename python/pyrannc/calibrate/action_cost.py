"""What an Action of a schedule costs the host, beside the Ops of its Stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from pyrannc.call.variant import Variant
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import Sample
from pyrannc.config import Config
from pyrannc.core.profile import ProfileFacts
from pyrannc.job import process
from pyrannc.planning.decision import decide
from pyrannc.planning.machine import find_cluster, own_device
from pyrannc.planning.measured import find_profiles
from pyrannc.planning.search import Request
from pyrannc.profile.meter import Meter
from pyrannc.runtime.deployment import Deployment
from pyrannc.runtime.step import Step, StepOptions

_FEW, _MANY = 2, 18
"""Numbers of microbatches; the second is also the rows of each rank."""
_WARM_UP_STEPS, _STEPS = 3, 20
_LEAST_US = 1.0


class _Tiny(nn.Module):
    """As little as can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean()  # type: ignore[no-any-return]  # modules have no result type


def measure_action_us(device: torch.device) -> float:
    """Time of an Action: one microbatch more is a forward and a backward more. All ranks call it.

    Returns:
        On rank 0, the time; of no meaning elsewhere.
    """
    more_us = (_step_us(device, _MANY) - _step_us(device, _FEW)) / (_MANY - _FEW)
    return max((more_us - _ops_us(device)) / 2, _LEAST_US)


def _batch() -> BatchRows:
    return BatchRows((_MANY,) * process.get_world_size(), gathered=True)


def _request(device: torch.device, microbatches: int) -> tuple[_Tiny, Request]:
    model, x, batch = _Tiny(), torch.zeros(_MANY, 8, device=device), _batch()
    variant = Variant(Sample(model, (x,), {}, device, _MANY, (1,)), batch)
    config = Config(partition_num=1, pipeline_num=microbatches, profile="never")
    return model, Request(variant, [x], config, None, device, batch.total, gather_inputs=True)


def _step_us(device: torch.device, microbatches: int) -> float:
    """Time of a step with so many microbatches."""
    model, request = _request(device, microbatches)
    variant = request.variant
    plan = decide(request, None)
    variant.divide(plan.partition(variant.graph))
    deployment = Deployment(
        model, variant, plan, None, device, None, sync_params=False, fused_dropout=True, reduce_dtype="float32"
    )
    batch = _batch()
    program = variant.program(plan, deployment.buckets, batch.per_rank, batch.gathered, "whole")
    options = StepOptions(reduce=True, keep_graph=False)

    def step() -> None:
        Step(deployment.context(variant, program), program, request.samples, 0, variant, options, batch).results()

    us = _time_us(step, Meter(device))
    deployment.bring_back()
    return us


def _time_us(step: Callable[[], None], meter: Meter) -> float:
    """Time of a step, of which all ranks make the same number."""
    for _ in range(_WARM_UP_STEPS):
        step()
    meter.synchronize()
    start = time.perf_counter()
    for _ in range(_STEPS):
        step()
    meter.synchronize()
    return (time.perf_counter() - start) * 1e6 / _STEPS


def _ops_us(device: torch.device) -> float:
    """Time of the Ops of one microbatch, forward and backward; 0 on ranks other than 0."""
    _, request = _request(device, _MANY)
    request = replace(request, config=Config(profile="always", profile_cache=False))
    world_size = process.get_world_size()
    cluster = find_cluster(request.config, [own_device(device)] * world_size)
    blocks = request.variant.graph.blocks().hashes
    profiles = [ProfileFacts.of(found) for found in find_profiles(request, cluster, [""] * world_size)]
    points = [known.blocks[block][0] for known in profiles for block in blocks]
    return float(sum(us for point in points for us in (point.forward_us, point.backward_us)))
