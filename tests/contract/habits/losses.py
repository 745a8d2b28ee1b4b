"""What a loss is: sums, means over rows or tokens, several terms, inside or outside of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.settings import COVERING, EMPTY, REPLICAS, STAGES, TOGETHER, Setting
from tests.contract.training import (
    CLASSES,
    UNCOUNTED,
    VOCABULARY,
    WIDTH,
    Chain,
    Returns,
    TokenChain,
    classes,
    fit,
    padded,
    pairs,
    single,
)


@equal()
def mean_inside(job: Job) -> None:
    """The model returns a mean over rows, as of `F.mse_loss`."""
    fit(job, Returns(Chain(), F.mse_loss), pairs)


@equal()
def sum_inside(job: Job) -> None:
    """The model returns a sum over rows (`reduction="sum"`)."""
    fit(job, Returns(Chain(), lambda y, target: F.mse_loss(y, target, reduction="sum")), pairs)


@equal()
def sum_times_one_over_rows(job: Job) -> None:
    """The model multiplies a sum by one over the number of rows (`2.0 / x.shape[0]`)."""
    fit(job, Returns(Chain(), lambda y, target: (y - target).square().sum() * (2.0 / y.shape[0])), pairs)


@equal()
def sum_by_len(job: Job) -> None:
    """The model divides a sum by `len(x)`."""
    fit(job, Returns(Chain(), lambda y, target: (y - target).square().sum() / len(y)), pairs)


@warned("losses.py", "number of rows as a Python number", instead="`x.shape[0]`, which leaves nothing on all rows")
def sum_by_plain_number(job: Job) -> None:
    """The model divides a sum by `int(x.shape[0])`, which Python makes a plain number."""
    fit(job, Returns(Chain(), lambda y, target: (y - target).square().sum() / int(y.shape[0])), pairs)


@equal()
def mean_by_hand(job: Job) -> None:
    """The model divides a sum by the number of rows (`x.shape[0]`)."""
    fit(job, Returns(Chain(), lambda y, target: (y - target).square().sum() / y.shape[0]), pairs)


@equal()
def token_mean_inside(job: Job) -> None:
    """The model returns a mean over the tokens that are not `ignore_index`; rows have different numbers of them."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    fit(job, Returns(TokenChain(), loss), padded)


@equal()
def masked_mean_by_hand(job: Job) -> None:
    """The model returns `(errors * mask).sum() / mask.sum()`."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        mask = (labels != UNCOUNTED).to(logits.dtype)
        errors = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (errors * mask).sum() / mask.sum()

    fit(job, Returns(TokenChain(), loss), padded)


@equal()
def class_weights(job: Job) -> None:
    """The model returns a cross entropy with class weights."""
    weights = torch.linspace(0.5, 2.0, CLASSES)
    fit(job, Returns(Chain(outputs=CLASSES), lambda y, labels: F.cross_entropy(y, labels, weights)), classes)


@equal()
def label_smoothing(job: Job) -> None:
    """The model returns a cross entropy with label smoothing."""
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    fit(job, Returns(Chain(outputs=CLASSES), criterion), classes)


@equal()
def label_smoothing_over_tokens(job: Job) -> None:
    """The model returns a cross entropy with label smoothing and `ignore_index` tokens."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    fit(job, Returns(TokenChain(), loss), padded)


def _summed_over_items(logits: Tensor, labels: Tensor, items: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items


@equal()
def items_in_batch_as_tensor(job: Job) -> None:
    """The model divides a sum by `num_items_in_batch`, a tensor with the count of the global batch."""

    def data(rows: int, generator: Generator) -> tuple[Tensor, ...]:
        tokens, labels = padded(rows, generator)
        return tokens, labels, (labels != UNCOUNTED).sum()

    fit(job, Returns(TokenChain(), _summed_over_items), data)


@equal()
def items_in_batch_as_number(job: Job) -> None:
    """The model divides a sum by `num_items_in_batch`, a Python number with the count of the global batch."""

    def data(rows: int, generator: Generator) -> tuple[Any, ...]:
        tokens, labels = padded(rows, generator)
        return tokens, labels, int((labels != UNCOUNTED).sum())

    fit(job, Returns(TokenChain(), _summed_over_items), data)


@equal()
def several_terms(job: Job) -> None:
    """The model returns a mean, plus a weighted sum, plus a penalty of a weight."""
    net = Chain()

    def loss(y: Tensor, target: Tensor) -> Tensor:
        errors = y - target
        return errors.square().mean() + 0.1 * errors.abs().sum() + 0.01 * net.head.weight.square().sum()

    fit(job, Returns(net, loss), pairs)


@equal()
def weight_penalty_inside(job: Job) -> None:
    """The model returns a mean plus a penalty of a weight."""
    net = Chain()
    fit(job, Returns(net, lambda y, target: F.mse_loss(y, target) + 0.01 * net.head.weight.square().sum()), pairs)


def _penalised(job: Job) -> None:
    net = Returns(Chain(), F.mse_loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for batch in job.batches(pairs):
        optimizer.zero_grad()
        loss = model(*batch)
        (loss + 0.01 * sum(param.square().sum() for param in model.parameters())).backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal(settings=(REPLICAS,))
def weight_penalty_outside(job: Job) -> None:
    """The script adds a penalty of `model.parameters()` to the loss, and every rank holds the whole model."""
    _penalised(job)


@refused("RaNNCError", "in the model's forward", settings=(STAGES,), instead="add it in the model's `forward`")
def weight_penalty_of_parts(job: Job) -> None:
    """The same where other ranks hold a part of the parameters."""
    _penalised(job)


@equal()
def scaled_loss(job: Job) -> None:
    """The script divides the loss before `backward()`."""
    fit(job, Returns(Chain(), F.mse_loss), pairs, loss=lambda loss: loss / 4)


@equal()
def rows_of_losses(job: Job) -> None:
    """The model returns a loss for each row; the script takes the mean."""
    net = Returns(Chain(), lambda y, target: (y - target).square().mean(1))
    model = job.wrap(net)
    for batch in job.batches(pairs):
        losses = model(*batch)
        job.rows("losses", losses)
        (losses.sum() / max(1, len(losses))).backward()
    job.gradients(model)


@equal()
def criterion_outside_mean(job: Job) -> None:
    """The script takes a mean over its rows of what the model returns."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum() / max(1, len(y))

    fit(job, Chain(), pairs, criterion=loss)


_PARTS = (5, 3)
_OF_RANKS = tuple(Setting(_PARTS, stages, microbatches) for stages, microbatches in ((1, 1), (1, 2), (2, 1), (2, 4)))


def _mean_of_ranks(job: Job, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In one process, the mean of the losses that ranks have, weighted by their rows."""

    def mean(out: Tensor, target: Tensor) -> Tensor:
        parts = zip(out.split(_PARTS), target.split(_PARTS), _PARTS, strict=True)
        return torch.stack([loss(*part) * rows for *part, rows in parts]).sum() / sum(_PARTS)

    return loss if job.ranks > 1 else mean


@warned("criterion is outside of the model", settings=_OF_RANKS, instead="compute the sum in the model's forward")
def criterion_outside_sum(job: Job) -> None:
    """The script takes a sum over its rows: the loss is the mean of the ranks' sums, weighted by their rows."""
    fit(job, Chain(), pairs, criterion=_mean_of_ranks(job, nn.MSELoss(reduction="sum")))


@warned("criterion is outside of the model", settings=_OF_RANKS, instead="compute the mean in the model's forward")
def criterion_outside_token_mean(job: Job) -> None:
    """The script takes a mean over its counted tokens: the loss is the mean of the ranks' means, weighted by rows."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    fit(job, TokenChain(), padded, criterion=_mean_of_ranks(job, loss))


@equal()
def loss_in_dict(job: Job) -> None:
    """The model returns a dict with the loss and what was predicted."""
    _among_outputs(job, lambda y, target: {"loss": F.mse_loss(y, target), "logits": y}, lambda out: out["loss"])


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor


@equal()
def loss_in_dataclass(job: Job) -> None:
    """The model returns a dataclass with the loss and what was predicted."""
    _among_outputs(job, lambda y, target: Output(y, F.mse_loss(y, target)), lambda out: out.loss)


@equal()
def loss_in_tuple(job: Job) -> None:
    """The model returns a tuple of the loss and what was predicted."""
    _among_outputs(job, lambda y, target: (F.mse_loss(y, target), y), lambda out: out[0])


def _among_outputs(job: Job, result: Any, loss_of: Any) -> None:
    fit(job, Returns(Chain(), result), pairs, loss=loss_of)
    model = job.wrap(Returns(Chain(), result))
    out = model(*job.batch(pairs))
    job.same("loss", loss_of(out))
    job.rows("logits", out.logits if isinstance(out, Output) else out["logits"] if isinstance(out, dict) else out[1])


def _with_what_mixes(y: Tensor, target: Tensor) -> dict[str, Tensor]:
    """A loss, what was predicted, another scalar with gradients, and how alike rows are."""
    return {"loss": F.mse_loss(y, target), "logits": y, "size": y.square().mean(), "alike": y @ y.T}


@equal(note='`RaNNCModule(..., outputs=["loss"])`: in training mode the rest is neither computed nor moved')
def asked_outputs(job: Job) -> None:
    """The model returns more than the script reads, and the script says what it reads; in evaluation it reads all."""
    net = Returns(Chain(), _with_what_mixes)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, outputs=["loss"])
    for batch in job.batches(pairs):
        optimizer.zero_grad()
        loss = model(*batch)["loss"]
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(*job.batch(pairs))
    job.same("size", out["size"])
    job.rows("logits", out["logits"])
    job.state(model)


@equal(note="`RaNNCModule(..., outputs=[1])`")
def asked_outputs_by_position(job: Job) -> None:
    """Likewise, of a tuple without the loss, whose criterion is outside of the model."""
    net = Returns(Chain(), lambda y: (y.square().mean(), y))
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, outputs=[1])
    for x, target in job.batches(pairs):
        optimizer.zero_grad()
        _, y = model(x)
        job.rows("outputs", y)
        F.mse_loss(y, target).backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@refused("RaNNCError", "output 'logits' of the model was left", "model.eval()", settings=COVERING, instead="ask for it")
def output_that_was_not_asked_for(job: Job) -> None:
    """The script reads an output that it did not ask for in `outputs=[...]`."""
    model = job.wrap(Returns(Chain(), _with_what_mixes), outputs=["loss"])
    out = model(*job.batch(pairs))
    out["loss"].backward()
    torch.stack([out["logits"]])


@refused("CaptureError", "returns a dict with 'loss', 'logits'", instead="a key, an attribute or a position")
def asked_output_that_is_none(job: Job) -> None:
    """The script asks for an output that the model does not return."""
    job.wrap(Returns(Chain(), _with_what_mixes), outputs=["losses"])(*job.batch(pairs))


@refused("CaptureError", "leads back to parameters", instead="ask for the loss too")
def asked_outputs_without_gradients(job: Job) -> None:
    """The script asks for outputs alone that have no gradients."""
    net = Returns(Chain(), lambda y, target: (F.mse_loss(y, target), y.detach()))
    job.wrap(net, outputs=[1])(*job.batch(pairs))


@equal()
def summed_loss_in_dict(job: Job) -> None:
    """The model returns a dict with a loss that is a sum over rows."""
    _among_outputs(
        job, lambda y, target: {"loss": F.mse_loss(y, target, reduction="sum"), "logits": y}, lambda out: out["loss"]
    )


@equal()
def two_scalars_added(job: Job) -> None:
    """The model returns two scalars that the script adds up."""
    net = Returns(Chain(), lambda y, target: (F.mse_loss(y, target), y.square().mean()))
    fit(job, net, pairs, loss=lambda out: out[0] + 0.25 * out[1])


@equal()
def two_scalars_one_named_loss(job: Job) -> None:
    """The model returns `loss` and `aux_loss`; the script differentiates `loss`."""
    net = Returns(Chain(), lambda y, target: {"aux_loss": y.square().mean(), "loss": F.mse_loss(y, target)})
    fit(job, net, pairs, loss=lambda out: out["loss"])


@equal()
def loss_of_one_element(job: Job) -> None:
    """The model returns its loss with shape `(1,)`."""
    net = Returns(Chain(), lambda y, target: F.mse_loss(y, target).unsqueeze(0))
    fit(job, net, pairs)


@equal()
def mean_metric(job: Job) -> None:
    """The model returns its accuracy beside the loss."""

    def result(y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(y, labels), (y.argmax(1) == labels).to(y.dtype).mean()

    model = job.wrap(Returns(Chain(outputs=CLASSES), result))
    for batch in job.batches(classes):
        job.same("loss and accuracy", model(*batch))


@equal()
def counted_metric(job: Job) -> None:
    """The model returns the number of right answers beside the loss."""

    def result(y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(y, labels), (y.argmax(1) == labels).sum()

    model = job.wrap(Returns(Chain(outputs=CLASSES), result))
    for batch in job.batches(classes):
        job.same("loss and count", model(*batch))


@equal()
def mean_over_rows_returned(job: Job) -> None:
    """The model returns a vector that is a mean over rows."""
    model = job.wrap(Returns(Chain(), lambda y: y.mean(0)))
    for batch in job.batches(single):
        job.same("mean", model(*batch))


def _balance(y: Tensor, target: Tensor) -> Tensor:
    shares = torch.softmax(y, 1)
    chosen = F.one_hot(y.argmax(1), WIDTH).to(y.dtype)
    return F.mse_loss(y, target) + 0.1 * (shares.mean(0) * chosen.mean(0)).sum()


def _contrast(y: Tensor, target: Tensor) -> Tensor:
    logits = F.normalize(y, dim=1) @ F.normalize(target, dim=1).T
    return F.cross_entropy(logits, torch.arange(logits.shape[0]))


def _contrast_of_views(y: Tensor, target: Tensor) -> Tensor:
    views = F.normalize(torch.cat([y, target]), dim=1)
    logits = views @ views.T
    logits.fill_diagonal_(-1e9)
    return F.cross_entropy(logits, torch.arange(len(views)).roll(len(y)))


def _centred(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y - y.mean(0), target)


def _root(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target).sqrt()


def _norm(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).norm()


def _hardest(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean(1).topk(1).values.mean()


def _perplexity(y: Tensor, target: Tensor) -> dict[str, Tensor]:
    loss = F.mse_loss(y, target)
    return {"loss": loss, "perplexity": loss.detach().exp()}


def _spread(y: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"loss": F.mse_loss(y, target), "spread": y.detach().std(0)}


MIXING: dict[str, tuple[Callable[..., Any], str]] = {
    "product_of_means": (_balance, "A term is a product of means over rows, as the balance of experts"),
    "contrast": (_contrast, "Logits are rows by rows, as in contrastive losses"),
    "contrast_of_views": (
        _contrast_of_views,
        "So are those of two views in one batch, without themselves (`fill_diagonal_`)",
    ),
    "centred": (_centred, "The model takes away the mean over rows (`y - y.mean(0)`)"),
    "root_of_mean": (_root, "The loss is the root of a mean"),
    "norm": (_norm, "The loss is a norm over all rows"),
    "hardest_rows": (_hardest, "The loss is a mean of the rows with the greatest errors (`topk`)"),
    "exponent_of_mean": (_perplexity, "The model returns its perplexity, the exponent of a mean, beside the loss"),
    "spread": (_spread, "The model returns a standard deviation over rows beside the loss"),
}


def _loss_of(returned: Any) -> Tensor:
    return returned["loss"] if isinstance(returned, dict) else returned  # type: ignore[no-any-return]


def _mixing(name: str) -> Callable[[Job], None]:
    result, text = MIXING[name]

    def script(job: Job) -> None:
        fit(job, Returns(Chain(), result), pairs, loss=_loss_of)
        model = job.wrap(Returns(Chain(), result))
        job.same("returned", model(*job.batch(pairs)))

    script.__name__ = name
    script.__doc__ = f"{text}."
    return script


for _name in MIXING:
    equal(settings=(*COVERING, EMPTY))(_mixing(_name))


class _Views(nn.Module):
    """Encodes two views of each row together, and foretells one from the other."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], apart: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.encoder, self.head = Chain(2), Chain(3)
        self.join, self.apart = join, apart

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        first, second = self.apart(torch.relu_(self.encoder(self.join(x, other))))
        return F.mse_loss(self.head(first), second)


def _cat(x: Tensor, other: Tensor) -> Tensor:
    return torch.cat([x, other])


def _stack(x: Tensor, other: Tensor) -> Tensor:
    return torch.stack([x, other]).flatten(0, 1)


@equal(settings=(*COVERING, EMPTY))
def views_encoded_together(job: Job) -> None:
    """The model encodes two batches as one (`torch.cat`), and takes what comes of it apart (`chunk`)."""
    fit(job, _Views(_cat, lambda y: y.chunk(2)), pairs)


@equal(settings=(*COVERING, EMPTY))
def views_taken_apart_by_a_view(job: Job) -> None:
    """Likewise, and takes them apart by `view(2, rows, width)`, or `unbind` of `reshape(2, -1, width)`."""
    fit(job, _Views(_cat, lambda y: y.view(2, y.shape[0] // 2, WIDTH)), pairs)
    fit(job, _Views(_cat, lambda y: y.reshape(2, -1, WIDTH).unbind(0)), pairs)


@equal(settings=(*COVERING, EMPTY))
def views_stacked_and_flattened(job: Job) -> None:
    """Two batches become one by `torch.stack` and `flatten(0, 1)`, and are taken apart by `chunk` or a view."""
    fit(job, _Views(_stack, lambda y: y.chunk(2)), pairs)
    fit(job, _Views(_stack, lambda y: y.view(2, -1, WIDTH).unbind(0)), pairs)


class _StepsFirst(TokenChain):
    """Returns a loss of logits whose steps come before their rows."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = super().forward(tokens).transpose(0, 1)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.t().reshape(-1))


@equal(settings=(*COVERING, EMPTY))
def tokens_whose_steps_come_first(job: Job) -> None:
    """Logits are steps by rows, and the loss takes all of them in that order: `logits.view(-1, classes)`."""
    fit(job, _StepsFirst(), padded)


@equal(settings=TOGETHER, note='`RaNNCModule(..., row_mixing="microbatch")`')
def rows_mixed_in_one_microbatch(job: Job) -> None:
    """Rows meet each other in each microbatch on a Replica alone, and all rows are in one."""
    for result, _ in MIXING.values():
        model = job.wrap(Returns(Chain(), result), row_mixing="microbatch")
        returned = model(*job.batch(pairs))
        job.same("returned", returned)
        _loss_of(returned).backward()
        job.gradients(model)


@equal(settings=(Setting((4, 4), 1, 2),), note='`RaNNCModule(..., row_mixing="microbatch")`')
def rows_mixed_by_microbatch(job: Job) -> None:
    """The model takes away the mean over the rows that a Replica has of a microbatch, as the script asks for."""
    model = job.wrap(Returns(Chain(), lambda y: y - y.mean(0)), row_mixing="microbatch")
    (x,) = job.batch(single)
    # Two microbatches on two Replicas have two rows each.
    out = model(x) if job.ranks > 1 else torch.cat([model(rows) for rows in x.split(2)])
    job.rows("output", out)
    (out.square().sum() / len(x)).backward()
    job.gradients(model)


class _Windows(nn.Module):
    """Sums over neighbouring features, by strides of what a product and a permutation have left in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        turned = torch.stack([self.chain(x), x], 1).permute(2, 0, 1)
        features, rows, kinds = turned.shape
        down, across, along = turned.stride()
        windows = turned.as_strided((features - 1, rows, kinds, 2), (down, across, along, down))
        return F.mse_loss(windows.sum(-1).permute(1, 2, 0).sum(1), target[:, 1:])


@equal()
def memory_read_by_strides(job: Job) -> None:
    """`tensor.as_strided(...)` of a tensor that is not contiguous, as in attention over windows."""
    fit(job, _Windows(), pairs)
