"""Trainings whose steps are replayed, to be held against the same ones without CUDA graphs."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import pyrannc
from pyrannc._native import Plan
from pyrannc.job import process
from pyrannc.store.gradient_set import GradientSet
from tests.runtime.plans import divided, scheduled

ROWS, TOKENS, WIDTH, WORDS = 8, 16, 64, 100


class Layer(nn.Module):
    """Attention and a product, both with dropout: one kernel of torch draws, another of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)


class Words(nn.Module):
    """A model of words, with its loss or without."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.inside = inside

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return _loss(logits, labels) if self.inside and labels is not None else logits


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Counted(nn.Module):
    """Batch normalisation, whose buffers each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2))


class Products(nn.Module):
    """Saves nothing of parameters that autocast does not convert, so that these may change before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.words(ids)).relu())


class Waits(Words):
    """The host waits for the device: how many elements are chosen is data."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        x = torch.zeros_like(x).masked_scatter(x > 0, x[x > 0])
        return _loss(self.head(x), ids if labels is None else labels)


@dataclass(frozen=True)
class Loop:
    """A way to train.

    Attributes:
        model: made anew.
        inside: the model is given labels, and returns its loss.
        step: one step, given a function from a number to the loss of that batch.
        env: settings of RaNNC.
        autocast: the model is called under it.
        schedule: the order of each Stage's computations, instead of the Plan's own.
        sharding: what Replicas divide, instead of what the Plan says.
        more: rows that the second rank has more than the first.
        same: so many steps are given their inputs as labels, too.
    """

    model: Callable[[], nn.Module]
    inside: bool
    step: Callable[[Callable[[int], Tensor], torch.optim.Optimizer, int], Tensor]
    env: dict[str, str] = field(default_factory=lambda: _REPLICAS)
    autocast: bool = False
    schedule: tuple[str, ...] = ()
    sharding: str = ""
    more: int = 0
    same: int = 0


@dataclass(frozen=True)
class Trained:
    """What a training has come to on a rank.

    Attributes:
        state: of the model.
        recorded: what ``report()`` says of graphs.
        gradient_sets: for how many steps' gradients there is memory.
    """

    losses: list[float]
    state: dict[str, Tensor]
    recorded: str
    gradient_sets: int


def plain(
    loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int, *, set_to_none: bool = True
) -> Tensor:
    loss = loss_of(step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    return loss


def zeros_kept(loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    return plain(loss_of, optimizer, step, set_to_none=False)


def zeroed_between(loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = loss_of(step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def accumulated(loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = loss_of(step)
    loss.backward()
    if step % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def two_calls(loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    first, second = loss_of(2 * step), loss_of(2 * step + 1)
    (first + 0.5 * second).backward()
    optimizer.step()
    optimizer.zero_grad()
    return first


def unused_call(loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss_of(100 + step)
    return plain(loss_of, optimizer, step)


def two_backwards(loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = loss_of(step)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def moved(loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Parameters get other memory in the middle."""
    if step == 4:
        for param in optimizer.param_groups[0]["params"]:
            param.data = param.data.clone()
    return plain(loss_of, optimizer, step)


class OneLate:
    """A step's backward comes after the next step's call; but for the last two steps, which can be measured."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def __call__(self, loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        if step >= 3:
            self._finish(optimizer)
            return plain(loss_of, optimizer, step)
        loss = loss_of(step)
        self._finish(optimizer)
        self._before = loss
        return loss.detach()

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        before, self._before = self._before, None
        if before is not None:
            optimizer.zero_grad()
            before.backward()
            optimizer.step()


_REPLICAS = {"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "1"}
_PIPELINE = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "4"}
_LATE = ("F0 F1 F2 F3 I0 I1 W0 I2 W1 I3 W2 W3", "F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3")
_PARTS = ("F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3")

LOOPS = {
    **{
        f"{step.__name__}, loss {'inside' if inside else 'outside'}": Loop(lambda i=inside: Words(i), inside, step)
        for step in (plain, zeroed_between, zeros_kept, accumulated, two_calls, unused_call, two_backwards)
        for inside in (True, False)
    },
    **{
        f"{name}, loss {'inside' if inside else 'outside'}": Loop(
            lambda i=inside: Words(i),
            inside,
            zeroed_between,
            env,
            autocast,
            sharding=sharding,
        )
        for name, env, autocast, sharding in (
            ("autocast", _REPLICAS, True, ""),
            ("Stages", _PIPELINE, False, ""),
            ("Stages and autocast", _PIPELINE, True, ""),
            ("ZeRO 1", _REPLICAS, False, "optimizer"),
            ("ZeRO 2", _REPLICAS, False, "gradients"),
            ("ZeRO 3", _REPLICAS, False, "params"),
            ("ZeRO 3 and autocast", _REPLICAS, True, "params"),
            ("ZeRO 3 kept", _REPLICAS, False, "kept_params"),
            ("ZeRO 3 kept and autocast", _REPLICAS, True, "kept_params"),
        )
        for inside in (True, False)
    },
    "backwards in two parts, loss inside": Loop(lambda: Words(True), True, zeroed_between, _PIPELINE, schedule=_PARTS),
    "backwards in two parts, loss outside": Loop(
        lambda: Words(False), False, zeroed_between, _PIPELINE, schedule=_LATE
    ),
    **{
        f"Stages and rows that differ, loss {'inside' if inside else 'outside'}": Loop(
            lambda i=inside: Words(i), inside, zeroed_between, _PIPELINE, more=3
        )
        for inside in (True, False)
    },
    "labels that were the inputs": Loop(lambda: Words(True), True, plain, same=4),
    "parameters moved": Loop(lambda: Words(True), True, moved),
    "buffers": Loop(Counted, False, plain),
    "buffers, two calls": Loop(Counted, False, two_calls),
}
"""By name; all of them are replayed."""

KEPT_AS_THEY_ARE = {
    "an operator waits": Loop(lambda: Waits(True), True, plain),
    "backwards are one call late": Loop(Products, False, OneLate(), autocast=True),
}
"""What no graph can hold."""


SAME = {
    inside: [
        Loop(
            lambda inside=inside: Words(inside).double(),
            inside,
            plain,
            {**_PIPELINE, "RANNC_COMPILE_SPANS": compiled},
            schedule=order,
        )
        for compiled, order in (("off", ()), ("on", ()), ("off", parts), ("on", parts))
    ]
    for inside, parts in ((True, _PARTS), (False, _LATE))
}
"""By place of the loss: the same training with and without compiled Spans, backwards whole and in two parts.

In double precision: the compiler takes the kernels that are fastest when it tries them, which may round otherwise.
"""


def train(loop: Loop, steps: int, graphs: str) -> Trained:
    """Trains on this rank, with its own rows of each batch."""
    device = process.ensure_process_group().device
    torch.manual_seed(3)
    module = loop.model().to(device)
    optimizer = AdamW(module.parameters(), lr=1e-3)
    model: Any = pyrannc.RaNNCModule(module, optimizer)

    def loss_of(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * number + process.get_rank())
        rows = ROWS + loop.more * process.get_rank()
        ids, labels = torch.randint(WORDS, (2, rows, TOKENS), generator=generator).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=loop.autocast):
            labels = ids if number < loop.same else labels
            return model(ids, labels) if loop.inside else _loss(model(ids), labels)

    if loop.schedule or loop.sharding:
        loss_of(0)
        plan = Plan.from_json(json.dumps(model.plan))
        changed = scheduled(plan, list(loop.schedule)) if loop.schedule else divided(plan, loop.sharding)
        model.undeploy()
        with NamedTemporaryFile(suffix=".json") as file:
            changed.write(Path(file.name))
            model = pyrannc.RaNNCModule(module, optimizer, load_deployment=file.name)
            loss_of(0)
    torch.manual_seed(5)
    losses = [loop.step(loss_of, optimizer, step).detach() for step in range(steps)]
    gc.collect()
    gradient_sets = sum(type(item) is GradientSet for item in gc.get_objects())
    state, recorded = dict(model.state_dict(rank0_only=False)), model.report().recorded
    found = Trained(torch.stack(losses).tolist(), state, recorded, gradient_sets)
    assert bool(found.recorded) == (graphs == "auto")
    model.undeploy()
    return found
