"""What no graph holds: shapes and numbers that depend on data, NumPy, loops over rows, branches on what is computed.

The smallest part of the model that holds it runs as it is: on all rows, unless trials show that it treats each row by
itself. A warning names the sub-module.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal, constraints, kl_divergence
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import SGD

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.settings import ONCE, UNCUT
from tests.contract.training import (
    CLASSES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Chain,
    OnPositive,
    Returns,
    TokenChain,
    classes,
    fit,
    learn,
    padded,
    pairs,
)

_KEPT = r"stays in one piece"


class _Late(Chain):
    """A chain with a sub-module before its last layers."""

    def __init__(self, late: nn.Module) -> None:
        super().__init__(5)
        self.layers[3] = late


@equal()
def shapes_depend_on_data(job: Job) -> None:
    """A sub-module has shapes that depend on data (`x[x > 0]`)."""
    fit(job, Returns(_Late(OnPositive()), F.mse_loss), pairs)


@equal()
def loss_of_counted_tokens(job: Job) -> None:
    """The loss is that of the tokens that count, by a mask: `F.cross_entropy(y[mask], labels[mask])`."""

    def loss(y: Tensor, labels: Tensor) -> Tensor:
        counted = labels != -100
        return F.cross_entropy(y[counted], labels[counted])

    fit(job, Returns(TokenChain(), loss), padded)


@equal()
def number_read_from_a_tensor(job: Job) -> None:
    """The model scales what it computes by a number that it reads from a tensor (`x.abs().max().item()`)."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y / y.detach().abs().max().item(), target)

    fit(job, Returns(Chain(), loss), pairs)


@equal()
def connectionist_loss(job: Job) -> None:
    """The model returns `F.ctc_loss` of labels without their padding (`masked_select`), as speech models do."""

    def loss(y: Tensor, labels: Tensor) -> Tensor:
        counted = labels > 0
        steps = torch.full(size=(y.shape[0],), fill_value=y.shape[1], dtype=torch.long)
        chances = F.log_softmax(y, -1).transpose(0, 1)
        flat = labels.masked_select(counted)
        return F.ctc_loss(chances, flat, steps, counted.sum(-1), blank=0, reduction="sum", zero_infinity=True)

    def data(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, labels = padded(rows, generator)
        labels = torch.where(labels > 0, labels, 0)
        return tokens, labels[:, :3]

    fit(job, Returns(TokenChain(), loss), data)


class _Routed(nn.Module):
    """Each row goes to one of some experts, whose weights are one parameter."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))

    def expert(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.experts[expert])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            (rows,) = torch.where(chosen == expert)
            made.index_add_(0, rows, self.expert(expert, x[rows]) * weights[rows, None])
        return x + made


@warned(_KEPT, "tested, not proven", instead="rows that do not meet stay on their Replica")
def experts_in_a_loop(job: Job) -> None:
    """A sub-module sends each row to an expert, in a loop over the experts that some row has chosen."""
    net = Chain(5)
    net.layers[1] = _Routed()
    fit(job, Returns(net, F.mse_loss), pairs)


class _Sorted(_Routed):
    """The same with the rows sorted by expert, computed, and put back."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort()
        made = torch.einsum("ri,roi->ro", x[order], self.experts[chosen[order]])
        return x + made[order.argsort()] * weights[:, None]


@warned(
    "rows of the batch meet in", "tested, not proven", instead="rows that are sorted and put back stay on their Replica"
)
def experts_sorted(job: Job) -> None:
    """A sub-module sorts all rows by expert, computes, and puts each row back."""
    net = Chain(5)
    net.layers[1] = _Sorted()
    fit(job, Returns(net, F.mse_loss), pairs)


class _RoutedModules(_Routed):
    """The same with a module for each expert."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def expert(self, expert: int, x: Tensor) -> Tensor:
        return self.linears[expert](x)  # type: ignore[no-any-return]


@warned(_KEPT, settings=ONCE, instead="")
def expert_that_no_row_chooses(job: Job) -> None:
    """In some steps, no row of the global batch chooses a certain expert, which has no gradient then (None)."""
    net = Chain(5)
    net.layers[1] = _RoutedModules()
    fit(job, Returns(net, F.mse_loss), pairs)


class _LargeExperts(_RoutedModules):
    """The same with most of the model's parameters, and a question to each expert whether some row has chosen it."""

    def __init__(self) -> None:
        super().__init__()
        wide = 8 * WIDTH
        self.linears = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for expert in range(len(self.linears)):
            (rows,) = torch.where(chosen == expert)
            if rows.numel() == 0:
                continue
            made.index_add_(0, rows, self.expert(expert, x[rows]) * weights[rows, None])
        return x + made


@warned(_KEPT, settings=ONCE, instead="")
def large_experts_in_evaluation(job: Job) -> None:
    """Experts with most of the parameters, each asked whether some row has chosen it; evaluation comes in between."""
    net = Returns(_Late(_LargeExperts()), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step in range(3):
        learn(job, model, optimizer, step=step)
        model.eval()
        with torch.no_grad():
            job.same("evaluated", model(*job.batch(pairs, 10 + step)))
        model.train()
    job.state(model)


class _InNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = np.asarray(x.detach().numpy()).mean(axis=0)
        return self.inner(x - torch.from_numpy(mean))  # type: ignore[no-any-return]


class _Unseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + 0.1 if torch.compiler.is_compiling() else y


@refused(
    "CaptureError", "another path", "leaf_modules", settings=ONCE, instead="`leaf_modules=[...]` for that sub-module"
)
def other_path_when_traced(job: Job) -> None:
    """A sub-module computes something else when it is traced (`if torch.compiler.is_compiling()`)."""
    fit(job, Returns(_Late(_Unseen()), F.mse_loss), pairs)


@warned(_KEPT, "on all rows", instead="torch's own operators can be divided")
def numpy_inside(job: Job) -> None:
    """A sub-module computes with NumPy what goes over all rows."""
    fit(job, Returns(_Late(_InNumpy()), F.mse_loss), pairs)


class _OverRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.inner(x[row]) * (1 + row % 2) for row in range(len(x))]
        return torch.stack(rows)


@warned(_KEPT, "on all rows", instead="a tensor operation over all rows")
def loop_over_rows(job: Job) -> None:
    """A sub-module loops over the rows (`for row in range(len(x))`), and what it does depends on their numbers."""
    fit(job, Returns(_Late(_OverRows()), F.mse_loss), pairs)


class _ByLookUp(nn.Module):
    """Trials with random numbers end in an error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not bool((x.detach().abs() <= 1).all()):
            raise ValueError("the layer before it ends in tanh")
        return self.inner(x * torch.from_numpy(np.cos(x.detach().numpy())))  # type: ignore[no-any-return]


@equal(note="`RaNNCModule(..., row_wise_modules=[...])`: each runs on the rows in hand")
def declared_row_by_row(job: Job) -> None:
    """The script says of such a sub-module that it treats each row by itself, which trials would not show."""
    net = Chain(5)
    net.layers[1] = _ByLookUp()
    chosen = torch.optim.SGD(net.parameters(), lr=0.1)
    model = job.wrap(Returns(net, F.mse_loss), chosen, row_wise_modules=["net.layers.1"])
    for batch in job.batches(pairs):
        chosen.zero_grad()
        loss = model(*batch)
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)
        chosen.step()
    job.state(model)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * 2 if y.sum() > 0 else y - 1  # type: ignore[no-any-return]


@warned(_KEPT, "on all rows", instead="`torch.where`")
def branch_on_what_is_computed(job: Job) -> None:
    """A sub-module branches on what it computes (`if y.sum() > 0`); batches take both branches."""
    torch.manual_seed(5)
    fit(job, Returns(_Late(_Branches()), F.mse_loss), pairs)


class _Conditional(nn.Module):
    """Branches by `torch.cond` with layers of their own, then loops by `torch.while_loop`.

    Args:
        on_rows: what it branches on is a sum over the rows, otherwise over parameters.
    """

    def __init__(self, *, on_rows: bool) -> None:
        super().__init__()
        self.inner, self.one, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.on_rows = on_rows

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        asked = y.sum() if self.on_rows else self.inner.weight.sum() - 0.3
        y = torch.cond(asked > 0, lambda y: self.one(y).tanh(), lambda y: self.other(y.view(y.shape)) - 1, (y,))
        _, grown = torch.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, self.one(y).sin() * 1.5), (torch.tensor(0), y)
        )
        return y + grown  # type: ignore[no-any-return]


_decayed = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)


def _conditional(job: Job, *, on_rows: bool) -> None:
    torch.manual_seed(5)
    fit(job, Returns(_Late(_Conditional(on_rows=on_rows)), F.mse_loss), pairs, optimizer=_decayed)


@equal()
def higher_order_operators(job: Job) -> None:
    """A sub-module branches by `torch.cond` on its parameters, and loops by `torch.while_loop`."""
    _conditional(job, on_rows=False)


@equal()
def branch_on_all_rows(job: Job) -> None:
    """A sub-module branches by `torch.cond` on what it computes of all rows of the batch."""
    _conditional(job, on_rows=True)


class _HiddenBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = torch.from_numpy(np.abs(x.detach().numpy()).sum(1, keepdims=True))
        return torch.cond(size.sum() >= 0, lambda x: self.one(x).tanh(), lambda x: self.other(x) - 1, (x,)) / (1 + size)


@equal()
def branch_in_what_stays_whole(job: Job) -> None:
    """What reads an array of NumPy branches by `torch.cond`, with layers of its own: those not taken decay, too."""
    torch.manual_seed(5)
    fit(job, Returns(_Late(_HiddenBranches()), F.mse_loss), pairs, optimizer=_decayed)


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.net(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class _Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.chain, self.packed = nn.Embedding(20, WIDTH), Chain(3), _Packed()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.packed(self.chain(self.embedding(tokens)), (labels != -100).sum(1)).pow(2).mean()  # type: ignore[no-any-return]


@warned(_KEPT, instead="")
def packed_sequences(job: Job) -> None:
    """A sub-module packs sequences of different lengths (`pack_padded_sequence`) for a recurrent layer."""
    fit(job, _Sequences(), padded)


class _Recurrent(nn.Module):
    """Classifies sequences of different lengths, which its own forward packs."""

    def __init__(self, net: nn.Module, *, pools: bool = False) -> None:
        super().__init__()
        self.embedding, self.net, self.head, self.pools = nn.Embedding(VOCABULARY, WIDTH), net, Chain(1, CLASSES), pools

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = self.net(packed)
        if self.pools:
            return self.head(pad_packed_sequence(outputs, batch_first=True)[0].mean(1))  # type: ignore[no-any-return]
        return self.head(last[-1] if isinstance(last, Tensor) else last[0][-1])  # type: ignore[no-any-return]


def _sequences(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (rows,), generator=generator)
    return tokens, lengths, torch.randint(0, CLASSES, (rows,), generator=generator)


def _classify(job: Job, net: nn.Module, *, equally_long: bool = False, **options: Any) -> None:
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, batch_arguments=["tokens", "lengths"], **options)
    for step, (tokens, lengths, labels) in enumerate(job.batches(_sequences)):
        optimizer.zero_grad()
        outputs = model(tokens, torch.full_like(lengths, TOKENS) if equally_long and step == 0 else lengths)
        job.rows("outputs", outputs)
        F.cross_entropy(outputs, labels).backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@warned("but for its sub-module 'embedding'", instead="what comes after the sub-module stays whole round it")
def packed_sequences_in_the_model_itself(job: Job) -> None:
    """The model's own forward packs the embeddings of sequences of different lengths for an LSTM."""
    _classify(job, _Recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True)))


@warned("The whole model", "tested, not proven", settings=UNCUT, instead="each rank computes its own rows")
def packed_sequences_uncut(job: Job) -> None:
    """The same with a GRU and `RaNNCModule(..., allow_uncut=True)`; sequences of the first batch have one length."""
    _classify(job, _Recurrent(nn.GRU(WIDTH, WIDTH, 4, batch_first=True)), equally_long=True, allow_uncut=True)


@refused("InputError", "total_length", settings=UNCUT, instead="`pad_packed_sequence(..., total_length=...)`")
def pooling_over_the_longest_sequence_at_hand(job: Job) -> None:
    """As above, and the mean is over as many tokens as the longest row of the batch has."""
    net = _Recurrent(nn.GRU(WIDTH, WIDTH, 4, batch_first=True), pools=True)
    _classify(job, net, equally_long=True, allow_uncut=True)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.mean: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.sum() > 0:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.calls += 1
        return y - self.mean  # type: ignore[no-any-return]


@warned(_KEPT, "on all rows", instead="")
def buffers_of_what_stays_whole(job: Job) -> None:
    """Such a sub-module changes buffers, one in place and one by assigning it anew."""
    fit(job, Returns(_Late(_Counting()), F.mse_loss), pairs)


class _OwnMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.shift = Chain(4), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def row_by_row(self, y: Tensor) -> Tensor:
        return torch.stack([self.scale(y[row]) for row in range(len(y))])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.row_by_row(self.shift(self.net(x))), target)


@warned("method row_by_row of the model", settings=ONCE, instead="the method stays whole, with the parameters it uses")
def loop_over_rows_in_a_method(job: Job) -> None:
    """A method of the model, not one of its sub-modules, loops over rows."""
    fit(job, _OwnMethod(), pairs)


def _row_by_row(y: Tensor, target: Tensor) -> Tensor:
    losses = [F.mse_loss(row, right) / (1 + row.detach().abs().max()) for row, right in zip(y, target, strict=True)]
    return torch.stack(losses).mean()


class _OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Chain(4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return _row_by_row(self.net(x), target)


@warned("function _row_by_row", settings=ONCE, instead="the function stays whole")
def loss_in_a_loop_over_rows(job: Job) -> None:
    """A function that the model calls by its name loops over rows, as losses of detection do."""
    fit(job, _OwnFunction(), pairs)


class _RowsInRoot(nn.Module):
    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        self.net, self.loss = Chain(4, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(x)
        made = [logits[row] / (1 + logits[row].abs().max()) for row in range(len(x))]
        if labels is None:
            return torch.stack(made)
        return torch.stack([F.cross_entropy(y, label) for y, label in zip(made, labels, strict=True)]).mean()


@warned("but for its sub-module 'net'", instead="what comes after the sub-module stays whole round it")
def loop_over_rows_in_the_model_itself(job: Job) -> None:
    """The model's own forward loops over rows, not one of its sub-modules."""
    fit(job, _RowsInRoot(loss=True), classes)


@warned("The whole model", settings=UNCUT, instead="all ranks compute the loss of the global batch")
def uncut_with_its_loss(job: Job) -> None:
    """The same with `RaNNCModule(..., allow_uncut=True)`, the loss inside of the model."""
    fit(job, _RowsInRoot(loss=True), classes, allow_uncut=True)


@warned("The whole model", "tested, not proven", settings=UNCUT, instead="each rank computes its own rows")
def uncut_with_the_criterion_outside(job: Job) -> None:
    """The same with the criterion outside of the model."""
    net = _RowsInRoot(loss=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, allow_uncut=True)
    for x, labels in job.batches(classes):
        optimizer.zero_grad()
        outputs = model(x)
        job.rows("outputs", outputs)
        F.cross_entropy(outputs, labels).backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


class _Policy(nn.Module):
    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.chain = Chain(4, CLASSES)
        self.checks = checks

    def forward(self, x: Tensor) -> Categorical:
        return Categorical(logits=self.chain(x), validate_args=self.checks)


class _PolicyGradient(nn.Module):
    """Raises how likely actions are, and how many are."""

    def __init__(self, checks: bool = True) -> None:
        super().__init__()
        self.policy = _Policy(checks)

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        chosen = self.policy(x)
        loss: Tensor = -chosen.log_prob(actions).mean() - 0.1 * chosen.entropy().mean()
        return loss


@equal()
def distribution_of_a_sub_module(job: Job) -> None:
    """A sub-module returns a `torch.distributions.Categorical`, which looks whether what it is given is valid."""
    fit(job, _PolicyGradient(), classes)


@equal()
def distribution_that_checks_nothing(job: Job) -> None:
    """The same, with `validate_args=False`."""
    fit(job, _PolicyGradient(checks=False), classes)


class _Around(nn.Module):
    """A distribution around what a chain makes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = Chain(3), Chain(3)

    def forward(self, x: Tensor) -> Normal:
        # By default nobody looks any more once torch.compile has been used.
        return Normal(self.mean(x), F.softplus(self.spread(x)), validate_args=True)


class _Likely(nn.Module):
    """How likely targets are."""

    def __init__(self) -> None:
        super().__init__()
        self.around = _Around()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        found = self.around(x)
        loss: Tensor = kl_divergence(found, Normal(0.0, 1.0)).mean() - found.log_prob(target).mean()
        return loss


class _Mean(_Likely):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.around(x).mean, target)


@equal()
def distributions_of_what_is_computed(job: Job) -> None:
    """`torch.distributions.Normal(mean, spread)` of what the model computes, with `log_prob` and `kl_divergence`."""
    fit(job, _Likely(), pairs)


class _Waits(Distribution):
    """How long something takes to come."""

    arg_constraints: ClassVar = {"rate": constraints.positive}
    support = constraints.real

    def __init__(self, rate: Tensor) -> None:
        self.rate = rate
        super().__init__(rate.shape, validate_args=True)

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        return self.rate.log() - self.rate * value


class _MadeWithoutGradients(_Likely):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rate = F.softplus(self.around.spread(x))
        with torch.no_grad():
            found = _Waits(rate)
        loss: Tensor = -found.log_prob(self.around.mean(x) - target).mean()
        return loss


@equal()
def distribution_made_without_gradients(job: Job) -> None:
    """One of the script's own is made under `torch.no_grad()`, and has the tensor that it is given."""
    fit(job, _MadeWithoutGradients(), pairs)


@refused("ValueError", "loc of torch.distributions.Normal at", "is not valid", apart=True, instead="as one process")
def distribution_of_what_is_not_valid(job: Job) -> None:
    """The same, and a later batch makes the model compute no numbers."""
    model = job.wrap(_Likely())
    x, target = job.batch(pairs)
    model(x, target).backward()
    model(x * float("nan"), target)


@warned("given validate_args=False", instead="with `Normal(..., validate_args=False)` it is cut")
def distribution_of_which_a_part_is_used(job: Job) -> None:
    """A sub-module returns a `Normal`, of which the model uses the mean alone: nothing depends on the spread."""
    fit(job, _Mean(), pairs)


class _Forces(nn.Module):
    """Energies of rows, and their derivatives by what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Chain(3, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return F.mse_loss(-slope, target) + energy.square().mean()


@warned("The whole model", settings=UNCUT, instead="`allow_uncut=True`: all ranks compute the global batch")
def forces_in_the_forward(job: Job) -> None:
    """The forward differentiates energies by positions: `torch.autograd.grad(..., create_graph=True)`."""
    fit(job, _Forces(), pairs, allow_uncut=True)


@refused(
    "CaptureError", "differentiates inside of the forward", "allow_uncut", settings=ONCE, instead="`allow_uncut=True`"
)
def forces_in_a_forward_that_is_cut(job: Job) -> None:
    """The same, without `allow_uncut=True`."""
    job.wrap(_Forces())(*job.batch(pairs))
