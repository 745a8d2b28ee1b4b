"""How models are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import ONCE, STAGES, Setting
from tests.contract.training import (
    CLASSES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Chain,
    Returns,
    fit,
    learn,
    learn_around,
    padded,
    pairs,
)

_CHANNELS = 2


def _fit(job: Job, net: nn.Module) -> None:
    fit(job, Returns(net, F.mse_loss), pairs)


@equal()
def tied_weights(job: Job) -> None:
    """Layers share a weight."""
    net = Chain()
    net.head.weight = net.layers[0].weight
    _fit(job, net)


class _Listed(nn.Module):
    """Has a layer in a plain list, where the model does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()
        self.others = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.others[0](self.chain(x)), target)


@refused("CaptureError", "nn.ModuleList", instead="`nn.ModuleList`, `nn.ParameterList`")
def layers_in_a_plain_list(job: Job) -> None:
    """The model has layers in a plain list, whose parameters the script has given to the optimizer."""
    net = _Listed()
    optimizer = SGD([*net.parameters(), *net.others[0].parameters()], lr=0.1)
    learn(job, job.wrap(net, optimizer), optimizer)


@refused(
    "RaNNCError",
    'layers.0.weight" and "net.head.weight" share memory',
    "one parameter",
    settings=ONCE,
    instead="`net.head.weight = net.layers[0].weight`",
)
def weights_tied_by_data(job: Job) -> None:
    """Two parameters of one memory: `net.head.weight.data = net.layers[0].weight.data`."""
    net = Chain()
    net.head.weight.data = net.layers[0].weight.data
    _fit(job, net)


class _Images(nn.Module):
    """Convolutions whose weights and inputs have channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(_CHANNELS * WIDTH // 2, WIDTH)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 2, WIDTH // 2).expand(-1, _CHANNELS, -1, -1).contiguous(memory_format=torch.channels_last)
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
        made: Tensor = self.head(x.mean(2).flatten(1))
        return made


@equal(settings=(STAGES, Setting((5, 3), 1, 2, zero="1"), Setting((3, 0, 5), 1, 4, zero="2")))
def channels_last(job: Job) -> None:
    """`net.to(memory_format=torch.channels_last)`, with several convolutions."""
    _fit(job, _Images())


@equal()
def frozen_from_the_start(job: Job) -> None:
    """Some parameters do not require gradients."""
    net = Chain()
    net.layers[1].requires_grad_(False)
    _fit(job, net)


@equal()
def weight_norm(job: Job) -> None:
    """A layer has `parametrizations.weight_norm`."""
    net = Chain()
    parametrizations.weight_norm(net.layers[0])
    _fit(job, net)


@equal()
def orthogonal(job: Job) -> None:
    """A layer has `parametrizations.orthogonal`."""
    net = Chain()
    parametrizations.orthogonal(net.layers[0])
    _fit(job, net)


@equal()
def spectral_norm(job: Job) -> None:
    """A layer has `parametrizations.spectral_norm`, which changes buffers in every call."""
    net = Chain()
    parametrizations.spectral_norm(net.layers[0])
    _fit(job, net)


@equal()
def pruned(job: Job) -> None:
    """A layer is pruned by `torch.nn.utils.prune`, which works by a hook."""
    net = Chain()
    prune.l1_unstructured(net.layers[0], "weight", amount=0.5)
    _fit(job, net)


class _Denoising(nn.Module):
    """Noise is added as a schedule has it at each row's step, and told from what comes of that."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(5)
        self.register_buffer("kept", torch.linspace(0.99, 0.1, VOCABULARY))

    def forward(self, x: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        kept = self.kept.gather(-1, steps).view(-1, 1)
        lost = torch.take(1.0 - self.kept, steps).view(-1, 1)
        return F.mse_loss(self.chain(kept.sqrt() * x + lost.sqrt() * noise), noise)


@equal()
def schedule_by_steps(job: Job) -> None:
    """Each row has a step, whose number a buffer's elements are taken by (`gather`, `torch.take`), as in diffusion."""

    def noisy(rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, noise = pairs(rows, generator)
        return x, torch.randint(0, VOCABULARY, (rows,), generator=generator), noise

    fit(job, _Denoising(), noisy)


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTMCell(WIDTH, WIDTH)
        self.second = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = state = torch.zeros_like(x)
        for _ in range(3):
            hidden, cell = self.first(x, (hidden, cell))
            state = self.second(hidden, state)
        return self.head(state)  # type: ignore[no-any-return]


@equal(settings=(Setting((3, 3, 2), 3, 2),))
def recurrent_cells(job: Job) -> None:
    """The model loops over steps with an `nn.LSTMCell` and an `nn.GRUCell`."""
    _fit(job, _Cells())


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.chain = Chain(3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x.view(-1, 2, WIDTH // 2).repeat(1, 1, 2))
        return self.chain(states[:, -1])  # type: ignore[no-any-return]


@equal()
def recurrent(job: Job) -> None:
    """The model has an LSTM with `batch_first=True`."""
    _fit(job, _Recurrent())


@equal()
def transformer(job: Job) -> None:
    """The model has an `nn.TransformerEncoder` with `batch_first=True` and a padding mask."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=labels < 0)
            return self.head(hidden.mean(1)).square().mean()  # type: ignore[no-any-return]

    fit(job, Net(), padded)


def _positions(rows: int, generator: Generator) -> tuple[Tensor]:
    return (torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator),)


@equal()
def rows_from_shape(job: Job) -> None:
    """The model reads `x.shape[0]`, expands positions to it, and works on all tokens as rows."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
            self.chain = Chain()

        def forward(self, tokens: Tensor) -> Tensor:
            rows, length = tokens.shape
            positions = torch.arange(length).expand(rows, length)
            hidden = (self.embedding(tokens) + self.positions(positions)).view(rows * length, WIDTH)
            return self.chain(hidden).view(rows, -1).square().mean()  # type: ignore[no-any-return]

    fit(job, Net(), _positions)


@equal()
def detached_part(job: Job) -> None:
    """A part of the model runs under `torch.no_grad()`, another result is detached."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = torch.sigmoid(self.layers[0](x))
            return super().forward(x * scale) + x.detach()

    _fit(job, Net())


@equal()
def checkpointed(job: Job) -> None:
    """A part of the model runs under `torch.utils.checkpoint`."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return hidden + x

    _fit(job, Net())


@equal()
def checkpointed_reentrant(job: Job) -> None:
    """The same in its older form (`use_reentrant=True`), behind another layer."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = checkpoint(self.layers[1], self.layers[0](x).tanh(), use_reentrant=True)
            return self.head(self.layers[2](hidden) + x)  # type: ignore[no-any-return]

    _fit(job, Net())


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 2)


@equal()
def own_autograd_function(job: Job) -> None:
    """The model has an `autograd.Function` of its own."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return _Clipped.apply(super().forward(x)) + x  # type: ignore[no-any-return, no-untyped-call]

    _fit(job, Net())


_clipped: Any = _Clipped.apply


@equal()
def own_autograd_function_by_name(job: Job) -> None:
    """The same under a name of its own (`clipped = Clipped.apply`), first called after a step without it."""

    class Net(Chain):
        clips = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return _clipped(y) + x if self.clips else y

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "clips", True))


@equal()
def mapped(job: Job) -> None:
    """The model uses `torch.func.vmap` over rows."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.dot)(super().forward(x), x)[:, None].expand_as(x)

    _fit(job, Net())


@equal()
def input_changed_in_place(job: Job) -> None:
    """The model changes its input and results in place."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x.clone().mul_(2.0))
            y[:, 0] = 0.5
            return y.add_(1.0)

    _fit(job, Net())


@equal()
def complex_buffer(job: Job) -> None:
    """The model has a complex buffer, as rotary embeddings do."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) * 1.0))

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.view_as_complex(x.view(-1, WIDTH // 2, 2)) * self.turns
            return super().forward(torch.view_as_real(turned).flatten(1))

    _fit(job, Net())


@equal()
def unused_parameters(job: Job) -> None:
    """The model has parameters that no call uses."""
    net = Chain()
    net.unused = nn.Linear(WIDTH, WIDTH)
    _fit(job, net)


@equal()
def hugging_face_masked_tokens(job: Job) -> None:
    """A Hugging Face BERT with labels; rows have different numbers of masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = BertForMaskedLM(config)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for tokens, labels in job.batches(padded):
        optimizer.zero_grad()
        out = model(input_ids=tokens, attention_mask=(labels >= 0).long(), labels=labels)
        job.same("loss", out.loss)
        job.rows("logits", out.logits)
        out.loss.backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal()
def evaluated_batch_norm(job: Job) -> None:
    """The model has BatchNorm layers in evaluation mode."""
    net = Chain()
    net.layers[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model = job.wrap(net)
    model.eval()
    for batch in job.batches(pairs):
        out = model(batch[0])
        job.rows("output", out)
        (out - batch[1]).square().sum().div(max(1, len(out))).backward()
        job.gradients(model)
    job.state(model)


class _Positioned(Chain):
    """Returns its positions, too, once for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(40, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.positions, Tensor)
        return super().forward(x), self.positions.mul(2).unsqueeze(0).repeat(x.shape[0], 1, 1)


@equal()
def a_table_returned_for_each_row(job: Job) -> None:
    """The model returns a tensor beside its result that is the same for each row, and larger than all else."""
    net = _Positioned()
    model = job.wrap(net)
    for batch in job.batches(pairs):
        out, positions = model(batch[0])
        job.rows("output", out)
        job.rows("positions", positions)
        (out - batch[1]).square().sum().div(max(1, len(out))).backward()
        job.gradients(model)


class _Patches(Chain):
    """Patches of an image become its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(1, WIDTH, 2, 2), nn.BatchNorm2d(WIDTH)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        images = x.unsqueeze(1).unsqueeze(1).repeat(1, 1, 4, 1)
        tokens = self.norm.eval()(self.patches(images)).flatten(2).transpose(1, 2)
        return super().forward(F.layer_norm(tokens, (WIDTH,))).sum(1)  # type: ignore[no-any-return]


@equal(settings=(Setting((8,), 1, 8), Setting((7, 1), 2, 1)))
def batch_norm_of_one_image(job: Job) -> None:
    """A convolution and a BatchNorm2d in evaluation mode, whose images are tokens later, for parts of one row."""
    torch.manual_seed(3)
    _fit(job, _Patches())


class _Fills(nn.Module):
    """Leaves more than it returns in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Chain()

    def forward(self, batch: dict[str, Tensor], found: Any) -> Tensor:
        y: Tensor = self.net(batch.pop("x"))
        batch["y"], found.size = y, y.detach().abs().mean()
        return y.detach()


@equal()
def results_in_arguments(job: Job) -> None:
    """The forward puts results into a dict and an object that it is given, and the script trains on one of them."""
    model = job.wrap(_Fills())
    for x, target in job.batches(pairs):
        batch, found = {"x": x}, SimpleNamespace()
        job.rows("result", model(batch, found))
        loss = F.mse_loss(batch["y"], target)
        job.same("size", found.size)
        loss.backward()
        job.gradients(model)


class _Named(Chain):
    """Names its parts for a profiler."""

    @torch.profiler.record_function("hidden")
    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        with torch.profiler.record_function("head"):
            return self.head(x)  # type: ignore[no-any-return]


@equal(note="a profile has torch's operators; the names show where a part stays whole")
def parts_named_for_a_profiler(job: Job) -> None:
    """The forward names its parts (`with torch.profiler.record_function("head"):`), and a profiler runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        _fit(job, _Named())
