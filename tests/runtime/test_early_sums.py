"""Gradients are summed over ranks while the backward goes on, however many of them one node of autograd gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from pyrannc.job import process
from pyrannc.store import gradients, spread_sums
from pyrannc.store.buckets import Bucket, SharedParam
from pyrannc.store.spread_sums import SpreadSums
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
LAYERS, PARAMS, ELEMENTS = 4, 16, 3
CPU = torch.device("cpu")


class Layer(Function):
    """As a compiled Span: one node for all of its parameters. It says when its backward begins."""

    @staticmethod
    def forward(ctx: Any, log: list[str], name: str, x: Tensor, *params: Tensor) -> Tensor:
        ctx.log, ctx.name, ctx.count = log, name, len(params)
        return x + sum(params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.log.append(f"backward of {ctx.name}")
        return (None, None, *(grads[0].clone() for _ in range(1 + ctx.count)))


def _bucket(number: int, params: list[SharedParam]) -> Bucket:
    numel = ELEMENTS * len(params)
    return Bucket(
        number=number,
        params=params,
        numel=numel,
        ranks=(0, 1),
        types=(torch.float32, torch.float32),
        message=torch.float32,
        device=CPU,
        start=number * 128,
        parts=(),
        span=None,
        is_spread=False,
        is_gathered=False,
        is_kept=False,
        kept=(0, numel),
    )


def _spread(bucket: Bucket, span: int) -> Bucket:
    """Of which each rank keeps a half."""
    half, rank = bucket.numel // 2, process.get_rank()
    return replace(bucket, parts=(half, half), span=span, is_spread=True, kept=(half * rank, half * (rank + 1)))


def _params() -> list[SharedParam]:
    return [
        SharedParam(f"{layer}.{place}", nn.Parameter(torch.zeros(ELEMENTS)), (0, 1))
        for layer in range(LAYERS)
        for place in range(PARAMS)
    ]


def _buckets(params: list[SharedParam], count: int) -> list[Bucket]:
    """Of so many parameters each, from the last one on."""
    starts = enumerate(range(0, len(params), count))
    return [_bucket(number, list(reversed(params))[start : start + count]) for number, start in starts]


def _run(made: gradients.Gradients, buckets: list[Bucket], log: list[str]) -> gradients.GradientSet:
    current = made.begin({})
    for bucket in buckets:
        made.sum(current, bucket.number, filled=False)
    made.expect(frozenset())
    x = torch.ones(ELEMENTS)
    for layer in range(LAYERS):
        leaves = [made.leaves[f"{layer}.{place}"] for place in range(PARAMS)]
        x = Layer.apply(log, f"layer {layer}", x, *leaves)  # type: ignore[no-untyped-call]  # torch has no types
    x.sum().backward()  # type: ignore[no-untyped-call]  # likewise
    log.append("end of the backward")
    made.collect(current)
    made.finish(current)
    return current


def _job(layers_of_bucket: int) -> tuple[list[str], list[Tensor]]:
    process.ensure_process_group()
    log: list[str] = []
    params = _params()
    buckets = _buckets(params, PARAMS * layers_of_bucket)
    start_sum = gradients.start_sum

    def started(tensor: Tensor, group: Any) -> Any:
        log.append("sum")
        return start_sum(tensor, group)

    with patch.object(gradients, "start_sum", started):
        made = gradients.Gradients(params, buckets, {}, lambda _: None)
        current = _run(made, buckets, log)
    return log, list(current.views.values())


def _job_in_parts() -> tuple[list[str], list[Tensor]]:
    """Each layer has two buckets, of whose sums each rank keeps a half."""
    process.ensure_process_group()
    log: list[str] = []
    params = _params()
    buckets = [_spread(bucket, LAYERS - 1 - bucket.number // 2) for bucket in _buckets(params, PARAMS // 2)]
    finish = SpreadSums.finish

    def finished(sums: SpreadSums) -> None:
        log.append(f"wait for layer {sums._bucket.span}")
        finish(sums)

    with patch.object(SpreadSums, "finish", finished):
        current = _run(gradients.Gradients(params, buckets, {}, lambda _: None), buckets, log)
    return log, list(current.flats.values())


class Failing(list[str]):
    """A log during which a backward raises."""

    def append(self, text: str) -> None:
        if text == "backward of layer 0":
            raise ValueError(text)
        super().append(text)


class Noted:
    """What is under way, and whether somebody has waited for it."""

    def __init__(self, work: Any) -> None:
        self._work, self.awaited = work, False

    def wait(self) -> None:
        self.awaited = True
        self._work.wait()


def _job_after_failure(in_parts: bool) -> tuple[list[bool], list[Tensor]]:
    """Whether the sums of a backward that has failed were waited for before the next one, whose sums come with it."""
    process.ensure_process_group()
    params, log = _params(), list[str]()
    buckets = _buckets(params, PARAMS)
    if in_parts:
        buckets = [_spread(bucket, LAYERS - 1 - bucket.number) for bucket in buckets]
    made, noted = gradients.Gradients(params, buckets, {}, lambda _: None), list[Noted]()
    start_sum, scatter_sum = gradients.start_sum, spread_sums.scatter_sum

    def started(*args: Any) -> Any:
        noted.append(Noted(start_sum(*args)))
        return noted[-1]

    def scattered(*args: Any) -> Any:
        own, works = scatter_sum(*args)
        noted.extend(map(Noted, works))
        return own, noted[-len(works) :]

    with (
        patch.object(gradients, "start_sum", started),
        patch.object(spread_sums, "scatter_sum", scattered),
        pytest.raises(ValueError, match="layer 0"),
    ):
        _run(made, buckets, Failing())
    made.begin({})
    awaited = [work.awaited for work in noted]
    return awaited, list(_run(made, buckets, log).flats.values())


def test_sums_of_a_backward_that_fails_are_waited_for_before_the_next_one(ranks: Ranks) -> None:
    for in_parts in (False, True):
        for awaited, sums in ranks(2).run(_job_after_failure, in_parts):
            assert awaited == [True] * (LAYERS - 1)
            kept = PARAMS * LAYERS * ELEMENTS // (2 if in_parts else 1)
            assert sum(int((found == 2.0).sum()) for found in sums) == kept


def test_a_sum_starts_when_its_gradients_are_there(ranks: Ranks) -> None:
    expected = [f"backward of layer {layer}" for layer in (3, 2, 1, 0)]
    for layers_of_bucket in (1, 2):
        for log, sums in ranks(2).run(_job, layers_of_bucket):
            ends = [place + 1 for place in range(LAYERS) if (place + 1) % layers_of_bucket == 0]
            steps = [step for place, text in enumerate(expected, 1) for step in [text, *["sum"] * (place in ends)]]
            assert log == [*steps, "end of the backward"]
            assert all(torch.equal(found, torch.full((ELEMENTS,), 2.0)) for found in sums)


def test_a_layers_sums_in_parts_are_waited_for_in_the_next_layers_backward(ranks: Ranks) -> None:
    expected = ["backward of layer 3", "backward of layer 2"]
    for layer in (3, 2, 1):
        waits = [f"wait for layer {layer}"] * 2
        expected += [*waits, f"backward of layer {layer - 2}" if layer > 1 else "end of the backward"]
    for log, sums in ranks(2).run(_job_in_parts):
        assert log == [*expected, "wait for layer 0", "wait for layer 0"]
        kept = PARAMS * LAYERS * ELEMENTS // 2
        assert sum(int((found == 2.0).sum()) for found in sums) == kept
