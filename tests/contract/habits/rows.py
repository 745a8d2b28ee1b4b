"""What the rows of a batch are, and what arguments may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.settings import COVERING, DIVIDED, EMPTY, ONCE, PIPELINE, REPLICAS, STAGES, TOGETHER, Setting
from tests.contract.training import CLASSES, WIDTH, Chain, Returns, fit, pairs, single

_EQUAL_EXTENT = (Setting((4, 4), 1, 2), Setting((4, 4), 2, 1), Setting((4, 4), 2, 2))


@equal(settings=(REPLICAS, STAGES, PIPELINE, EMPTY))
def uneven_and_empty_batches(job: Job) -> None:
    """Ranks bring different numbers of rows, some none."""
    fit(job, Returns(Chain(), F.mse_loss), pairs)


def _train_on(job: Job, net: nn.Module, sizes: tuple[int, ...]) -> None:
    """A step with each of these numbers of rows."""
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step, rows in enumerate(sizes):
        optimizer.zero_grad()
        loss = model(*job.batch(pairs, step, rows))
        job.same("loss", loss)
        loss.backward()
        optimizer.step()
    job.state(model)


@equal()
def rows_change(job: Job) -> None:
    """The number of rows changes from step to step."""
    _train_on(job, Returns(Chain(), F.mse_loss), (8, 16, 8, 24))


@equal()
def branch_by_the_number_of_rows(job: Job) -> None:
    """The forward goes another way for more than twelve rows, or where they are a multiple of three."""

    class Net(Chain):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            y = super().forward(x if x.shape[0] > 12 else x * 0.5)
            if len(y) % 3 == 0:
                y = y + 1.0
            return F.mse_loss(y, target) * min(x.shape[0], 20) / max(x.shape[0], 7)

    _train_on(job, Net(), (8, 24, 8, 16, 32, 16))


@equal()
def branch_by_rows_and_length(job: Job) -> None:
    """The forward goes another way for more than thirty tokens in all, and the length of rows changes."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.shape[0] * x.shape[1] > 30 else x * 0.5).square().mean()

    model = job.wrap(Net())
    for step, (rows, length) in enumerate(((8, 2), (8, 3), (8, 2), (8, 5), (24, 3), (8, 3), (16, 2), (24, 2))):
        (x,) = job.batch(single, step, rows)
        loss = model(x[:, None].repeat(1, length, 1))
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)


@equal()
def rows_asked_by_one_rank(job: Job) -> None:
    """One rank alone asks whether there are more than twelve rows, to print something."""

    class Net(Chain):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            if job.rank == 0 and x.shape[0] > 12:
                print("many rows")
            return F.mse_loss(super().forward(x), target)

    _train_on(job, Net(), (8, 24, 8, 16))


@equal()
def first_rows_count_for_more(job: Job) -> None:
    """The forward weighs its rows by their places, of which it writes down the first six."""

    class Net(Chain):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            y = super().forward(x)
            return F.mse_loss(y[:6], target[:6]) + F.mse_loss(y, target)

    _train_on(job, Net(), (8, 24, 16))


@equal()
def nested_arguments(job: Job) -> None:
    """Arguments are dicts, lists and tuples of tensors, beside strings, None and flags."""

    class Net(Chain):
        def forward(self, batch: dict[str, Any], *, mode: str, extra: Tensor | None = None) -> dict[str, Any]:
            x, (shift, _) = batch["x"], batch["more"]
            y = super().forward(x) + shift
            return {"y": [y, {"half": y / 2 if mode == "half" else y}], "extra": extra, "mode": mode}

    model = job.wrap(Net())
    for x, target in job.batches(pairs):
        out = model({"x": x, "more": [target, None]}, mode="half")
        job.rows("output", out)
        (out["y"][1]["half"].square().sum() / max(1, len(x))).backward()
        job.gradients(model)


class _OfSequences(nn.Module):
    """Takes a sequence for each row, or tensors with all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, items: list[Tensor], shift: Tensor | None = None) -> Tensor:
        x = torch.stack(items).sum(0)
        return self.chain(x if shift is None else x + shift)  # type: ignore[no-any-return]


@equal()
def list_of_tensors_with_rows(job: Job) -> None:
    """An argument is a list of tensors that have the batch as dimension 0, beside another tensor of that extent."""
    model = job.wrap(_OfSequences())
    for x, target in job.batches(pairs):
        out = model([x, target], target)
        job.rows("output", out)
        (out.square().sum() / max(1, len(x))).backward()
        job.gradients(model)


def _parts_of_one(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets that are parts of one tensor."""
    x, target = torch.randn(2, rows, WIDTH, generator=generator)
    return x, target


@equal()
def inputs_of_one_tensor(job: Job) -> None:
    """Inputs and targets are parts of one tensor: `x, target = both`."""

    fit(job, Returns(Chain(), lambda y, target: F.mse_loss(y.flatten(), target.flatten())), _parts_of_one)


class _Joined(nn.Module):
    """Runs several batches of the same extent as one, and takes them apart again by ``apart``."""

    def __init__(self, apart: Callable[[Tensor, int], Sequence[Tensor]]) -> None:
        super().__init__()
        self.chain = Chain()
        self.apart = apart

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.chain(torch.cat([x, target, x - target]))
        anchor, near, far = self.apart(y, len(x))
        return F.mse_loss(anchor, near) + F.relu(1.0 - (anchor - far).square().mean(1)).mean()


@equal()
def batches_joined_and_taken_apart(job: Job) -> None:
    """Anchors, positives and negatives run as one batch: `chunk(3)` of it, or `split(len(x))`."""
    fit(job, _Joined(lambda y, rows: y.chunk(3)), pairs)
    fit(job, _Joined(lambda y, rows: y.split(rows)), pairs)


@equal(settings=(*COVERING, EMPTY))
def views_of_batches_of_one_tensor(job: Job) -> None:
    """Parts of one tensor run as one batch, which `view(3, rows, -1)` takes apart, `unbind` or an index."""
    fit(job, _Joined(lambda y, rows: y.view(3, rows, WIDTH)), _parts_of_one)
    fit(job, _Joined(lambda y, rows: y.view(3, -1, WIDTH).unbind(0)), _parts_of_one)


@equal(settings=(*COVERING, EMPTY))
def rows_repeated_and_averaged(job: Job) -> None:
    """Each row runs twice: `x.repeat(2, 1)`, and the mean over `view(2, rows, -1)`."""

    class Net(Chain):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            y = super().forward(x.repeat(2, 1)).view(2, x.shape[0], WIDTH).mean(0)
            return F.mse_loss(y, target)

    fit(job, Net(), _parts_of_one)


class _Centered(Chain):
    """Takes the mean of each two neighbouring rows off them, and holds what is left against the targets."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = super().forward(x).view(-1, 2, WIDTH)
        return F.mse_loss((y - y.mean(1, keepdim=True)).reshape(-1, WIDTH), target)


class _Permuted(nn.Module):
    """Pulls each row towards another one, whose number it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        y = self.chain(x)
        return F.mse_loss(y, y[order].detach() + 1)


def _with_numbers(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH, generator=generator), torch.randperm(rows, generator=generator)


@warned("numbers of rows: they count over the rows of all ranks", instead="add the rows of the ranks before")
def rows_taken_by_given_numbers(job: Job) -> None:
    """An argument has numbers of rows, such as a permutation, which count over the global batch."""
    fit(job, _Permuted(), _with_numbers)


@equal()
def pairs_of_neighbouring_rows(job: Job) -> None:
    """Two neighbouring rows are one item: `y.view(-1, 2, width)`, of which ranks may have one each."""
    fit(job, _Centered(), pairs)


class _CenteredAlone(nn.Module):
    """Likewise, and decides by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, y: Tensor) -> Tensor:
        paired = (y * self.scale).view(-1, 2, WIDTH)
        paired = paired - paired.mean(1, keepdim=True)
        if paired.detach().abs().max().item() > 100.0:
            paired = paired / 100.0
        return paired.reshape(-1, WIDTH)


@warned("'net.1'", instead="the sub-module runs in one piece, on the rows of all ranks")
def pairs_in_what_stays_whole(job: Job) -> None:
    """As above, in a sub-module that goes by its own results."""
    net = nn.Sequential(Chain(), _CenteredAlone(), nn.Linear(WIDTH, WIDTH))
    fit(job, Returns(net, F.mse_loss), pairs)


class _Halves(Chain):
    """Holds the first half of the batch against the second."""

    def __init__(self, halves: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.halves = halves

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        a, b = self.halves(super().forward(x))
        return F.mse_loss(a, b) + F.mse_loss(a, target[: len(a)])


@equal()
def halves_of_a_batch(job: Job) -> None:
    """The first half of the batch is held against the second: `a, b = y.chunk(2)`."""
    _train_on(job, _Halves(lambda y: y.chunk(2)), (8, 16, 8))


@equal()
def halves_of_a_batch_by_a_view(job: Job) -> None:
    """The same with `y.view(2, -1, width)`, where ranks may have a row or none."""
    _train_on(job, _Halves(lambda y: y.view(2, -1, WIDTH).unbind(0)), (8, 16, 8))


@equal()
def chosen_beside_rejected(job: Job) -> None:
    """Rows come in pairs, the chosen one first: `y.reshape(-1, 2 * width)`, and `y[::2]` beside `y[1::2]`."""

    class Net(Chain):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            y = super().forward(x)
            chosen, rejected = y.reshape(-1, 2 * WIDTH).chunk(2, dim=1)
            margin = (chosen - rejected).mean(1) + (y[::2] - target[1::2]).mean(1)
            return -F.logsigmoid(margin).mean()

    fit(job, Net(), pairs)


@equal(note="alone, the list must be named: `batch_arguments=[0]`")
def list_of_tensors_that_is_named(job: Job) -> None:
    """The arguments are such a list alone, and the script names it."""
    model = job.wrap(_OfSequences(), batch_arguments=["items"])
    for x, target in job.batches(pairs):
        out = model([x, target])
        job.rows("output", out)
        (out.square().sum() / max(1, len(x))).backward()
        job.gradients(model)


@refused(
    "InputError|MismatchError", "torch.stack|item for each row", instead="make one tensor of it: `torch.stack(...)`"
)
def list_with_an_item_for_each_row(job: Job) -> None:
    """An argument is a list with a tensor for each row of the batch, as of images."""
    model = job.wrap(_OfSequences())
    (x,) = job.batch(lambda rows, generator: (torch.randn(rows, 5, WIDTH, generator=generator),))
    model(list(x.unbind(0)))


def _labelled(rows: int, generator: Generator) -> tuple[Tensor, ...]:
    x, _ = pairs(rows, generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator), torch.linspace(0.5, 2.0, CLASSES)


@equal()
def argument_without_rows(job: Job) -> None:
    """An argument has no rows and another extent than the batch, such as a scale for each class."""
    net = Returns(Chain(outputs=CLASSES), lambda y, labels, scale: F.cross_entropy(y * scale, labels))
    fit(job, net, _labelled)


@equal()
def class_weights_as_argument(job: Job) -> None:
    """Class weights of the loss are an argument."""
    fit(job, Returns(Chain(outputs=CLASSES), F.cross_entropy), _labelled)


def _weighted(y: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    return F.mse_loss(y, target) * weights.sum()


def _with_weights(job: Job, **options: Any) -> None:
    weights = torch.linspace(0.5, 2.0, 4)
    model = job.wrap(Returns(Chain(), _weighted), **options)
    for x, target in job.batches(pairs):
        loss = model(x, target, weights)
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)


@refused(
    "InputError",
    "argument 2",
    "rows",
    r"batch_arguments=\[",
    settings=_EQUAL_EXTENT,
    instead="name those with rows: `RaNNCModule(..., batch_arguments=[...])`",
)
def argument_with_the_batch_extent(job: Job) -> None:
    """An argument without rows has just as many elements as the batch has rows."""
    _with_weights(job)


@refused(
    "InputError",
    "argument 0",
    "rows",
    settings=_EQUAL_EXTENT,
    instead="name those with rows: `RaNNCModule(..., batch_arguments=[...])`",
)
def first_argument_with_the_batch_extent(job: Job) -> None:
    """The first argument is such a one."""

    class Net(Returns):
        def forward(self, weights: Tensor, *rest: Tensor) -> Any:
            x, target = rest
            return super().forward(x, target, weights)

    model = job.wrap(Net(Chain(), _weighted))
    for x, target in job.batches(pairs):
        job.same("loss", model(torch.linspace(0.5, 2.0, 4), x, target))


def _looked_up(y: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    index = torch.arange(y.shape[0], device=y.device)
    index[:] = 0
    return F.mse_loss(y, target) * weights[index].mean() * weights.sum()


@refused(
    "InputError",
    "argument 2",
    "rows",
    settings=_EQUAL_EXTENT,
    instead="name those with rows: `RaNNCModule(..., batch_arguments=[...])`",
)
def argument_looked_up_by_what_was_written_over(job: Job) -> None:
    """Such an argument is looked up by row numbers that are written over: `index[:] = 0`."""
    model = job.wrap(Returns(Chain(), _looked_up))
    for x, target in job.batches(pairs):
        job.same("loss", model(x, target, torch.linspace(0.5, 2.0, 4)))


@refused("InputError", "batch_arguments", "forward", instead="the names in the model's `forward`")
def no_such_argument(job: Job) -> None:
    """`RaNNCModule(..., batch_arguments=[...])` has a name that is not an argument's."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = job.wrap(Net(), batch_arguments=["inputs"])
    model(*job.batch(single))


@equal(settings=_EQUAL_EXTENT)
def arguments_with_rows_named(job: Job) -> None:
    """The same, with `RaNNCModule(..., batch_arguments=["x", 1])`, names or positions."""
    _with_weights(job, batch_arguments=["x", 1])


@equal(settings=(Setting((4, 4), 1, 2), Setting((2, 6), 2, 1), Setting((2, 0, 6), 2, 2)))
def extent_of_one_rank(job: Job) -> None:
    """An argument without rows has as many elements as one rank has rows, or as all ranks have in a later call."""
    model = job.wrap(Returns(Chain(), _weighted))
    for step, rows in enumerate((16, 8)):
        loss = model(*job.batch(pairs, step, rows), torch.linspace(0.5, 2.0, 4))
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)


@refused(
    "InputError|CaptureError|PlanError", "row", settings=DIVIDED, instead="put the batch first (`batch_first=True`)"
)
def batch_in_dimension_one(job: Job) -> None:
    """The rows are in dimension 1 of the arguments, as `nn.LSTM` and `nn.Transformer` take them by default."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH)
            self.chain = Chain(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.chain(self.lstm(x)[0])  # type: ignore[no-any-return]

    model = job.wrap(Net())
    whole = torch.randn(4, 8, WIDTH, generator=Generator().manual_seed(1))
    job.rows("output", model(job.own(whole, dim=1)).transpose(0, 1))


_EQUAL_ROWS = (Setting((4, 4), 1, 2), STAGES)


class _TimeFirst(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.chain = layer, Chain(3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        return self.chain(made[0] if isinstance(made, tuple) else made)  # type: ignore[no-any-return]


def _time_first(job: Job, layer: nn.Module, **options: Any) -> None:
    model = job.wrap(_TimeFirst(layer), **options)
    whole = torch.randn(5, 8, WIDTH, generator=Generator().manual_seed(1))
    job.rows("output", model(job.own(whole, dim=1)).transpose(0, 1))


@refused(
    "CaptureError",
    "dimension 0",
    "batch_first",
    settings=_EQUAL_ROWS,
    instead="put the batch first (`batch_first=True`)",
)
def batch_in_dimension_one_of_lstm(job: Job) -> None:
    """The rows are in dimension 1 of what `nn.LSTM`, `nn.GRU` or `nn.RNN` takes, as many on every rank."""
    _time_first(job, nn.LSTM(WIDTH, WIDTH))


@refused(
    "InputError", "dimension 0", "batch_first", settings=_EQUAL_ROWS, instead="put the batch first (`batch_first=True`)"
)
def batch_in_dimension_one_of_attention(job: Job) -> None:
    """The rows are in dimension 1 of what `nn.TransformerEncoderLayer` takes, as many on every rank."""
    _time_first(job, nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0))


@equal(settings=_EQUAL_ROWS)
def batch_in_dimension_one_of_layers_by_row(job: Job) -> None:
    """The rows are in dimension 1, as many on every rank, and the model treats every step of every row by itself."""
    _time_first(job, nn.Linear(WIDTH, WIDTH))


@equal(note='`batch_arguments=["x"]`')
def attention_over_rows(job: Job) -> None:
    """A layer is meant to run along the rows of the batch, and the script names the arguments that have them."""
    torch.manual_seed(0)
    model = job.wrap(_TimeFirst(nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)), batch_arguments=["x"])
    whole = torch.randn(8, 1, WIDTH, generator=Generator().manual_seed(1))
    job.rows("output", model(job.own(whole)))


@equal()
def rows_in_dimension_one_inside(job: Job) -> None:
    """The model puts the batch into dimension 1 for a layer and back again."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, WIDTH)
            self.chain = Chain(3)

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.lstm(x.view(-1, 2, 3).transpose(0, 1))
            return self.chain(states.transpose(0, 1)[:, -1])  # type: ignore[no-any-return]

    fit(job, Returns(Net(), F.mse_loss), pairs)


@equal(settings=(*COVERING, EMPTY))
def cumulated_over_rows(job: Job) -> None:
    """The model cumulates over rows (`cumsum(0)`)."""
    model = job.wrap(Returns(Chain(), lambda y: y.cumsum(0)))
    job.rows("output", model(*job.batch(single)))


@equal(settings=(*COVERING, EMPTY))
def rows_flipped(job: Job) -> None:
    """The model mixes each row with another one (`x.flip(0)`, mixup)."""
    model = job.wrap(Returns(Chain(), lambda y: y + y.flip(0)))
    job.rows("output", model(*job.batch(single)))


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Chain(3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.norm(self.first(x)))), target)


@equal(settings=TOGETHER)
def batch_norm_together(job: Job) -> None:
    """BatchNorm in training, with all rows computed together."""
    fit(job, _Normed(), pairs)


@warned("normalises over the rows in hand", settings=(Setting((4, 4), 1, 2),), instead="`nn.GroupNorm`, `nn.LayerNorm`")
def batch_norm_of_parts(job: Job) -> None:
    """BatchNorm in training: each Replica normalises its own rows of each microbatch, as it is with DDP."""
    model = job.wrap(_Normed())
    x, target = job.batch(pairs)
    # Two microbatches on two Replicas have two rows each.
    parts = [(x, target)] if job.ranks > 1 else list(zip(x.split(2), target.split(2), strict=True))
    loss = torch.stack([model(*part) for part in parts]).mean()
    job.same("loss", loss)
    loss.backward()
    job.gradients(model)


@refused(
    "InputError|PlanError|RaNNCError",
    "BatchNorm|batch_norm",
    "row",
    settings=(Setting((4, 4), 1, 4), Setting((7, 1), 2, 8), Setting((3, 3, 2), 1, 4)),
    instead="fewer microbatches or Replicas (`min_pipeline_bs`)",
)
def batch_norm_of_a_single_row(job: Job) -> None:
    """BatchNorm in training gets a single row of a microbatch on a Replica."""
    fit(job, _Normed(), pairs)


@refused("InputError", "no rows", settings=ONCE, instead="leave out the call on all ranks")
def no_rows_at_all(job: Job) -> None:
    """No rank brings a row."""
    model = job.wrap(Chain())
    model(torch.zeros(0, WIDTH))


@refused("InputError", "batch size cannot be told", instead="pass at least one tensor with rows")
def no_argument_with_rows(job: Job) -> None:
    """No argument has a dimension."""
    job.wrap(Returns(Chain(), lambda y: y))(torch.tensor(1.0))


@refused("InputError", "tensor 1 of the arguments is sparse", "stays whole", instead="pass its indices and values")
def a_sparse_argument(job: Job) -> None:
    """An argument is a sparse tensor, such as the adjacency of a graph."""
    model = job.wrap(Returns(Chain(), lambda y, matrix: torch.sparse.mm(matrix, y.t())))
    model(torch.ones(4, WIDTH), torch.eye(WIDTH).to_sparse())


@equal(note="`gather_inputs=False`")
def inputs_of_the_first_rank(job: Job) -> None:
    """Rank 0 brings the whole batch (`RaNNCModule(..., gather_inputs=False)`)."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, gather_inputs=False)
    for step in range(3):
        x, target = pairs(8, Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x, target) if job.rank == 0 else model(x.zero_(), target.zero_())
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal()
def same_tensor_twice(job: Job) -> None:
    """The script passes a tensor for two arguments, and two tensors in the next call."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    for step in range(2):
        x, target = job.batch(pairs, step)
        loss = model(x, target if step else x)
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)


def _hardest(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean(1).topk(max(1, int(0.5 * len(y)))).values.mean()


@equal()
def hardest_half_of_the_rows(job: Job) -> None:
    """The loss is over the rows with the largest errors, `int(0.5 * len(x))` of them."""
    fit(job, Returns(Chain(), _hardest), pairs)
