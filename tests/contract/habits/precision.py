"""`torch.autocast`, `torch.amp.GradScaler`, and models in bfloat16.

Here *equal* is to the rounding of the narrow type: parts of a batch are rounded each, and added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.contract.habit import equal, refused
from tests.contract.job import Data, Job
from tests.contract.settings import ONCE, PIPELINE, REPLICAS
from tests.contract.training import WIDTH, Chain, Returns, classes, clipped, padded, pairs
from tests.runtime.equivalence import default_dtype

SOME = (REPLICAS, PIPELINE)
ROUNDING = 0.03
"""Of bfloat16, over three steps: parts of a batch are rounded each."""


def _float32() -> AbstractContextManager[None]:
    return default_dtype(torch.float32)


def _data(data: Data, dtype: torch.dtype = torch.float32) -> Data:
    """The same numbers in another type."""

    def made(rows: int, generator: Generator) -> tuple[Any, ...]:
        return tuple(part.to(dtype) if part.is_floating_point() else part for part in data(rows, generator))

    return made


def _bf16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def _train(
    job: Job,
    net: nn.Module,
    data: Data = pairs,
    *,
    region: Callable[[], Any] = _bf16,
    criterion: Callable[..., Tensor] | None = None,
    backward_inside: bool = False,
    parts: int = 1,
    most: float = 0.0,
    optimizer: Callable[[Any], Optimizer] = lambda params: SGD(params, lr=0.1),
) -> nn.Module:
    """Three steps under ``region``, of ``parts`` calls each."""
    with _float32():
        net = net.float()
        chosen = optimizer(net.parameters())
        model = job.wrap(net, chosen)
        for step in range(3):
            chosen.zero_grad()
            for part in range(parts):
                batch = job.batch(_data(data), step * parts + part)
                with region():
                    if criterion is None:
                        loss = model(*batch)
                        job.same("loss", loss)
                    else:
                        out = model(batch[0])
                        job.rows("output", out)
                        loss = criterion(out, *batch[1:])
                    if backward_inside:
                        (loss / parts).backward()
                if not backward_inside:
                    (loss / parts).backward()
            if most:
                job.same("norm", clipped(model, most).float())
            job.gradients(model)
            chosen.step()
        job.state(model)
    return model


@equal(tolerance=ROUNDING)
def autocast_outside(job: Job) -> None:
    """The script calls the model under `torch.autocast`, and `loss.backward()` outside of it."""
    _train(job, Returns(Chain(), F.mse_loss))
    _train(job, Returns(Chain(outputs=9), F.cross_entropy), classes)


@equal(tolerance=ROUNDING, note="the backward's precision is that of the forward, not that of where it is called")
def autocast_round_all(job: Job) -> None:
    """`loss.backward()` is called inside of the `torch.autocast` region too."""
    _train(job, Returns(Chain(), F.mse_loss), backward_inside=True)


@equal(tolerance=ROUNDING)
def autocast_and_criterion_outside(job: Job) -> None:
    """Model and criterion run under `torch.autocast`; the criterion is outside of the model."""
    _train(job, Chain(), criterion=F.mse_loss)


class _Decorated(Chain):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@equal(SOME, tolerance=ROUNDING)
def autocast_as_a_decorator(job: Job) -> None:
    """The model's `forward` is decorated with `@torch.autocast(...)`."""
    _train(job, Returns(_Decorated(), lambda y, t: F.mse_loss(y.float(), t)), region=lambda: _bf16(False))


class _Regions(Chain):
    """The first layer and the rest, each with autocast on or off."""

    def __init__(self, first: bool, rest: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.rest = first, rest

    def forward(self, x: Tensor) -> Tensor:
        with _bf16(self.first):
            hidden = torch.tanh(self.layers[0](x))
        with _bf16(self.rest):
            return super().forward(self.norm(hidden.float()))


@equal(SOME, tolerance=ROUNDING)
def autocast_inside(job: Job) -> None:
    """A part of the model runs under `torch.autocast`."""
    _train(job, Returns(_Regions(True, False), F.mse_loss), region=lambda: _bf16(False))


@equal(tolerance=ROUNDING)
def autocast_switched_off_inside(job: Job) -> None:
    """The script calls the model under `torch.autocast`, and a part of it switches that off."""
    _train(job, Returns(_Regions(True, False), F.mse_loss))


@equal(SOME, tolerance=ROUNDING)
def autocast_in_two_types(job: Job) -> None:
    """`torch.set_autocast_dtype` chooses the type, and a region of another one is inside."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                hidden = torch.tanh(self.head(x))
            # torch keeps what a region has converted for those round it.
            return torch.tanh(self.layers[1](self.layers[0](hidden.float())))

    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    try:
        _train(job, Returns(Net(), F.mse_loss), region=lambda: torch.autocast("cpu"))
    finally:
        torch.set_autocast_dtype("cpu", before)


@equal(SOME, tolerance=ROUNDING)
def autocast_and_tied_weights(job: Job) -> None:
    """Under `torch.autocast`, layers far apart share a weight."""
    net = Chain()
    net.head.weight = net.layers[0].weight
    _train(job, Returns(net, F.mse_loss))


@equal(SOME, tolerance=ROUNDING)
def autocast_without_cache(job: Job) -> None:
    """`torch.autocast(..., cache_enabled=False)` round a model that uses a weight several times."""
    net = Chain()
    net.layers[1] = net.layers[0]
    region = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    _train(job, Returns(net, F.mse_loss), region=lambda: region)


@equal(tolerance=ROUNDING)
def autocast_and_accumulation(job: Job) -> None:
    """Under `torch.autocast`, gradients of two calls are added, then clipped."""
    _train(job, Returns(Chain(), F.mse_loss), parts=2, most=0.1)


@equal(SOME, tolerance=ROUNDING)
def autocast_and_attention(job: Job) -> None:
    """An encoder layer with attention, norms, dropout of 0 and a token loss under `torch.autocast`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, WIDTH)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
            )
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    _train(job, Net(), padded)


@equal(SOME, tolerance=ROUNDING)
def autocast_in_evaluation_only(job: Job) -> None:
    """Evaluation runs under `torch.autocast`, training without."""
    with _float32():
        net = Chain().float()
        optimizer = SGD(net.parameters(), lr=0.1)
        model = job.wrap(net, optimizer)
        for step in range(2):
            x, target = job.batch(_data(pairs), step)
            model.eval()
            with torch.no_grad(), _bf16():
                job.rows("evaluated", model(x))
            model.train()
            out = model(x)
            job.rows("output", out)
            optimizer.zero_grad()
            F.mse_loss(out, target).backward()
            job.gradients(model)
            optimizer.step()


class _Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@equal(SOME, tolerance=ROUNDING)
def autocast_and_custom_functions(job: Job) -> None:
    """An `autograd.Function` with `torch.amp.custom_fwd` and `custom_bwd` under `torch.autocast`."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_Doubled.apply(self.layers[0](x)))

    _train(job, Returns(Net(), F.mse_loss))


@equal(SOME, tolerance=ROUNDING)
def autocast_and_a_recurrent_layer(job: Job) -> None:
    """An `nn.LSTM` under `torch.autocast`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.chain = (
                nn.Linear(WIDTH, WIDTH),
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
                Chain(3),
            )

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.lstm(torch.stack([self.first(x), x], 1).float())[0]
            return self.chain(hidden[:, -1])  # type: ignore[no-any-return]

    # oneDNN has this layer in bfloat16 for some processors only.
    with torch.backends.mkldnn.flags(enabled=False):
        _train(job, Returns(Net(), F.mse_loss))


@equal(tolerance=ROUNDING)
def autocast_and_two_calls_before_backward(job: Job) -> None:
    """Under `torch.autocast`, the model is called twice, then a loss of both results is differentiated."""
    with _float32():
        net = Chain().float()
        optimizer = SGD(net.parameters(), lr=0.1)
        model = job.wrap(net, optimizer)
        for step in range(2):
            x, target = job.batch(_data(pairs), step)
            optimizer.zero_grad()
            with _bf16():
                first, second = model(x), model(target)
                loss = F.mse_loss(first.float(), second.float())
            loss.backward()
            job.gradients(model)
            optimizer.step()
        job.state(model)


@equal(SOME, tolerance=ROUNDING)
def autocast_and_a_step_before_backward(job: Job) -> None:
    """Under `torch.autocast`: call, `optimizer.step()`, another call, and only then `backward()` of the first."""
    with _float32():
        net = Chain().float()
        optimizer = SGD(net.parameters(), lr=0.1)
        model = job.wrap(net, optimizer)
        x, target = job.batch(_data(pairs))
        with _bf16():
            F.mse_loss(model(x).float(), target).backward()
            first = model(x)
        optimizer.step()
        with _bf16():
            model(x)
        optimizer.zero_grad()
        first.float().square().mean().backward()
        job.gradients(model)


@equal(tolerance=ROUNDING)
def scaled_float16(job: Job) -> None:
    """`torch.autocast` in float16 with `torch.amp.GradScaler`: scale, backward, unscale, clip, step, update."""
    with _float32():
        net = Returns(Chain().float(), F.mse_loss)
        optimizer = AdamW(net.parameters(), lr=0.01)
        model = job.wrap(net, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(*job.batch(_data(pairs), step))
            job.same("loss", loss)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = clipped(model, 0.5)
            job.same("norm", torch.where(norm.isfinite(), norm, -1.0).float())
            scaler.step(optimizer)
            scaler.update()
        job.state(model)


@equal(tolerance=ROUNDING, note="sums are made in float32, gradients end in bfloat16")
def model_in_bfloat16(job: Job) -> None:
    """The model is converted by `model.to(torch.bfloat16)`, its optimizer too; gradients of two calls are added."""
    with _float32():
        net = Returns(Chain().bfloat16(), F.mse_loss)
        optimizer = SGD(net.parameters(), lr=0.1)
        model = job.wrap(net, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                loss = model(*job.batch(_data(pairs, torch.bfloat16), 2 * step + part))
                job.same("loss", loss)
                loss.backward()
            job.gradients(model)
            optimizer.step()
        job.state(model)


@equal(SOME, tolerance=ROUNDING)
def norms_in_float32(job: Job) -> None:
    """Layers are in bfloat16, norms in float32."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x.float()).bfloat16()).float()

    with _float32():
        net = Net().bfloat16()
        net.norm.float()
        model = job.wrap(Returns(net, F.mse_loss))
        for step in range(2):
            loss = model(*job.batch(_data(pairs), step))
            job.same("loss", loss)
            loss.backward()
            job.gradients(model)
            model.zero_grad()


@refused("MismatchError", "autocast", settings=ONCE, instead="the same `torch.autocast` on all ranks")
def autocast_by_rank(job: Job) -> None:
    """One rank calls the model under `torch.autocast`, another one does not."""
    with _float32():
        net = Returns(Chain().float(), F.mse_loss)
        model = job.wrap(net)
        with _bf16(job.rank == 0):
            model(*job.batch(_data(pairs)))
