"""Random numbers in models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.contract.habit import alike, equal
from tests.contract.job import Job
from tests.contract.settings import SPREAD
from tests.contract.training import WIDTH, Chain, Returns, fit, learn, pairs, single


class _Dropped(Chain):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x)) + self.dropout(x)


@equal()
def dropout_of_rate_zero(job: Job) -> None:
    """The model has dropout layers of rate 0."""
    net = Returns(_Dropped(0.0), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    job.state(model)


@equal()
def dropout_evaluated(job: Job) -> None:
    """The model has dropout layers, and is in evaluation mode."""
    model = job.wrap(_Dropped())
    model.eval()
    for batch in job.batches(single):
        job.rows("output", model(*batch))


@equal()
def chance_outside_of_the_model(job: Job) -> None:
    """The script draws numbers with torch between calls: they are as if the model drew none of its own."""
    model = job.wrap(Chain())
    for batch in job.batches(single):
        torch.manual_seed(3)
        model(*batch)
        job.same("drawn", torch.rand(3))


@equal(settings=SPREAD)
def new_masks_in_each_call(job: Job) -> None:
    """Each call of a model with dropout draws new masks."""
    model = job.wrap(_Dropped())
    (x,) = job.batch(single)
    first, second = model(x), model(x)
    job.same("differ", not len(x) or not torch.equal(first, second))


@equal(settings=SPREAD)
def seed_repeats_masks(job: Job) -> None:
    """`torch.manual_seed` before calls repeats what they draw."""
    model = job.wrap(_Dropped())
    (x,) = job.batch(single)
    model(x)
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append([model(x), model(x)])
    job.same("repeated", [torch.equal(first, second) for first, second in zip(drawn[0], drawn[1], strict=True)])
    job.same("differ", not len(x) or not torch.equal(drawn[0][0], drawn[2][0]))


@equal(settings=SPREAD)
def masks_of_two_models(job: Job) -> None:
    """Two models draw different masks."""
    models = [job.wrap(nn.Sequential(nn.Dropout(), *(nn.Hardtanh(-9, 9) for _ in range(4)))) for _ in range(2)]
    ones = job.own(torch.ones(8, 50))
    first, second = (model(ones) for model in models)
    job.same("differ", not len(ones) or not torch.equal(first, second))


@equal(settings=SPREAD)
def rows_draw_their_own(job: Job) -> None:
    """Rows of all ranks and microbatches draw different masks."""
    model = job.wrap(_Masks())
    drawn = model(job.own(torch.ones(8, 60)))
    job.same("differ", len({tuple(row.tolist()) for row in drawn}) == len(drawn))
    job.rows("own", torch.ones(len(drawn)))


class _Masks(nn.Module):
    """Masks of two dropout layers, and layers that make a cut possible."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(), nn.Dropout(0.2)
        self.scales = nn.ParameterList(torch.ones(60) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.first(x)
        for scale in self.scales:
            drawn = torch.tanh(drawn * scale)
        return torch.cat([drawn, self.second(x)], 1)


@alike(settings=SPREAD, note="they are not those that the plain model draws")
def masks_of_plans(job: Job) -> None:
    """Dropout draws the same masks for the same rows under every Plan."""
    torch.manual_seed(1)
    model = job.wrap(_Masks())
    for _ in range(2):
        job.rows("masks", model(job.own(torch.ones(8, 60))))


@alike(settings=SPREAD, note="it is another one than that of the plain model")
def training_with_dropout(job: Job) -> None:
    """A training with dropout is the same under every Plan."""
    fit(job, Returns(_Dropped(), F.mse_loss), pairs)


@alike(settings=SPREAD, note="they are not those that the plain model draws")
def noise_of_plans(job: Job) -> None:
    """`torch.randn_like`, `torch.rand` and `torch.bernoulli` in the model draw the same under every Plan."""

    def noisy(y: Tensor, x: Tensor) -> Tensor:
        drawn = torch.randn_like(x) + torch.rand(x.shape[0], WIDTH) + torch.bernoulli(torch.full_like(x, 0.5))
        return y + drawn

    model = job.wrap(Returns(Chain(), noisy))
    (x,) = job.batch(single)
    job.rows("noisy", model(x, x))


class _Signed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (2 * torch.randint_like(y, 2) - 1)


@alike(settings=SPREAD, note="they are not those that the plain model draws")
def signs_of_activations(job: Job) -> None:
    """The model changes signs at random of what it computes (`torch.randint_like(y, 2)`), and is trained."""
    fit(job, Returns(_Signed(), F.mse_loss), pairs)


@equal()
def seeds_of_data(job: Job) -> None:
    """Ranks have different seeds, as for augmenting their data."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    torch.manual_seed(100 + job.rank)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@equal()
def noise_as_argument(job: Job) -> None:
    """The model takes noise that the script has drawn as an argument."""
    model = job.wrap(Returns(Chain(), lambda y, noise: (y + noise).square().mean()))
    for batch in job.batches(pairs):
        loss = model(*batch)
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)
