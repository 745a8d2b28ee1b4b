"""What the model asks its data from Python: `if mask.sum() > 4:`, `bool(...)`, `int(...)`, `.item()`.

The answer is that of the global batch, at the first call; a later batch must give the same one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import COVERING, EMPTY, ONCE, REPLICAS, STAGES, TOGETHER, Setting
from tests.contract.training import WIDTH, Chain, Returns, fit, pairs

Question = Callable[[Tensor], object]
"""Whether a choice is made, given a mask of rows."""

_ROWS = (*COVERING, EMPTY, Setting((WIDTH, 2), 1, 1))
"""Ranks without rows, too, and as many rows as features: a capture takes another number of rows then."""


def _masked(rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The first row alone of each eight is in the mask."""
    x, target = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    return x, target, torch.arange(rows) % 8 == 0


def _chooses(question: Question) -> Returns:
    def loss(y: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return F.mse_loss(y, target) if question(mask) else F.l1_loss(y * 3, target)

    return Returns(Chain(), loss)


@equal(settings=_ROWS)
def asked_sum_of_rows(job: Job) -> None:
    """`if mask.sum() > 6`, where the rows of all ranks are more than that and those of no rank are."""
    fit(job, _chooses(lambda mask: (~mask).sum() > 6), _masked)


@equal(settings=_ROWS)
def asked_whether_any_row(job: Job) -> None:
    """`if mask.any()`, which is true on one rank alone."""
    fit(job, _chooses(lambda mask: mask.any()), _masked)


@equal(settings=_ROWS)
def asked_whether_all_rows(job: Job) -> None:
    """`if mask.all()`, which is true on some ranks."""
    fit(job, _chooses(lambda mask: (~mask).all()), _masked)


@equal(settings=_ROWS)
def asked_the_same_on_all_ranks(job: Job) -> None:
    """A question about rows that every rank's own rows answer alike."""
    fit(job, _chooses(lambda mask: (mask.float() < 2).all()), _masked)


@equal(settings=_ROWS)
def asked_mean_of_rows(job: Job) -> None:
    """`if x.mean() > 0.1` of ranks with different numbers of rows: the mean of all rows, not that of ranks' means."""
    fit(job, _chooses(lambda mask: mask.double().mean().item() == 1 / 8), _masked)


@equal(settings=_ROWS)
def asked_number_of_rows_in_a_mask(job: Job) -> None:
    """`if int(mask.sum()) == 1`, as a Python number."""
    fit(job, _chooses(lambda mask: int(mask.sum()) == 1), _masked)


@equal(settings=(REPLICAS, STAGES))
def asked_input_of_the_first_rank(job: Job) -> None:
    """The same with `gather_inputs=False`: rank 0's rows answer."""
    model = job.wrap(_chooses(lambda mask: int(mask.sum()) == 1), gather_inputs=False)
    for step in range(3):
        x, target, mask = _masked(8, Generator().manual_seed(step))
        loss = model(x, target, mask if job.rank == 0 else ~mask)
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)


@refused("InputError", "another answer", settings=(*ONCE, EMPTY), instead="use `torch.where`")
def asked_sum_changes(job: Job) -> None:
    """The answer of all ranks' rows changes, while those of each rank's own rows stay."""

    def data(rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, target, mask = _masked(rows, generator)
        return x, target, mask if generator.initial_seed() == 0 else torch.arange(rows) % 8 < 3

    model = job.wrap(_chooses(lambda mask: (~mask).sum() > 6))
    for batch in job.batches(data):
        loss = model(*batch)
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)


class _Counted(Chain):
    """Takes a mean over the steps that rows have."""

    def forward(self, x: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        counted = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        y = super().forward(x) * counted[..., None]
        return F.mse_loss(y.sum(1) / lengths[:, None], target)


class _Trimmed(_Counted):
    def forward(self, x: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(x[:, : int(lengths.max())], target, lengths)


def _of_lengths(rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, target = torch.randn(rows, 5, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    return x, target, torch.randint(1, 4, (rows,), generator=generator) + generator.initial_seed()


@refused(
    "InputError",
    "another answer than 3",
    "mask what lies beyond",
    settings=(*ONCE, EMPTY),
    instead="mask the rest, or cut before the call",
)
def steps_of_longest_row(job: Job) -> None:
    """The forward cuts what it is given at the longest row of the batch: `x[:, :lengths.max()]`."""
    fit(job, _Trimmed(), _of_lengths)


@equal(settings=_ROWS)
def steps_of_longest_row_cut_before(job: Job) -> None:
    """The same, and the script cuts it there before the call, at one length on all ranks."""

    def data(rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, target, lengths = _of_lengths(rows, generator)
        return x[:, : int(lengths.max())], target, lengths

    fit(job, _Counted(), data)


@refused("InputError", "num_batches_tracked", "another answer", settings=TOGETHER, instead="give it a momentum")
def batch_norm_with_cumulative_average(job: Job) -> None:
    """BatchNorm with `momentum=None`, which divides by the number of its calls, in training."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None), nn.Linear(WIDTH, WIDTH))
    fit(job, net, pairs, criterion=F.mse_loss)


class _Begins(Chain):
    """Does something else at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.begun.fill_(True)
            x = x * 3
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


@equal(settings=(REPLICAS,))
def flag_of_a_first_call(job: Job) -> None:
    """A buffer tells of the first call (`if not self.begun`), and all ranks have it: it is captured again."""
    fit(job, _Begins(), pairs, criterion=F.mse_loss)


class _Asks(nn.Module):
    """Does something else where no gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Chain()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y if torch.is_grad_enabled() and y.requires_grad else y * 3


@equal()
def asked_whether_gradients_are_recorded(job: Job) -> None:
    """`if torch.is_grad_enabled()`, in steps of training and under `torch.no_grad()` between them."""
    model = job.wrap(_Asks())
    for x, target in job.batches(pairs):
        y = model(x)
        F.mse_loss(y, target).backward()
        job.gradients(model)
        with torch.no_grad():
            job.rows("evaluated", model(x))
