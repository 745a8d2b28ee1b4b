"""What all ranks tell each other at a call of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyrannc.call.batch_arguments import Arguments, BatchArguments, PerRow, RowsInDoubt
from pyrannc.call.data_guards import Answers
from pyrannc.call.drift import Drift
from pyrannc.call.equal import Course, Fingerprint, HyperParameters, combined, whole_inputs
from pyrannc.call.param_guards import ParamGuards
from pyrannc.call.recaptures import Recaptures
from pyrannc.call.shared_inputs import refuse_shared
from pyrannc.call.variant import Variant
from pyrannc.call.variants import CallKey, Variants
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import Sample, signature
from pyrannc.capture.nodes.autocast import Autocast, no_autocast
from pyrannc.capture.trace.dense import why_not_dense
from pyrannc.errors import InputError, MismatchError
from pyrannc.job import agree, process
from pyrannc.switches import switches

_NEW = -1
_FAILED = -2
_THAWED = -3
_UNDECIDED = -4
"""Numbers in the place of a captured form's: there is none yet, something is wrong, ``requires_grad`` has changed, it
has to be found out which arguments have rows."""

_WHICH = "the number of the wrapped model that is called (of several, which all ranks must call in the same order)"

_AS_CAPTURED, _BY_BUFFERS, _BY_OTHERS = range(3)
"""What answers a captured form's questions otherwise: nothing, buffers that all ranks have and that say yes or no, or
anything else."""
_MOST_ANSWERED = 4
"""Captured forms of one kind of call that differ in what buffers answer."""


@dataclass(frozen=True)
class AgreedCall:
    """A call that is the same on all ranks.

    Attributes:
        key: what it shares with others of the same captured form.
        variant: its captured form, if there is one already.
        tensors: of this rank's arguments.
        per_row: for each of them, how many elements of its dimension 0 each row has; 0: none.
        own_rows: of this rank's batch.
        batch: the rows of all ranks.
        answers: to the model's questions about the batch, to be checked before gradients are handed over.
        drawn: rank 0's number for the call's random numbers.
        doubt: whether all of these have rows, where that is not proven yet: before the call is carried out.
    """

    key: CallKey
    variant: Variant | None
    tensors: list[Tensor]
    per_row: PerRow
    own_rows: int
    batch: BatchRows
    answers: Answers | None
    drawn: int
    doubt: RowsInDoubt | None


class Agreement:
    """What the ranks tell each other at the calls of one model.

    Args:
        model: the user's.
        variants: its captured forms.
        optimizer: whose settings must be equal on all ranks.
        batch: which arguments have rows.
        gather_inputs: the rows of all ranks count, instead of those of rank 0 alone.
        recaptures: when calls are captured again and compared.
        course: what is known of the calls of an optimizer.

    Attributes:
        params: guards of this rank's parameters, once they are deployed.
        hyper_parameters: what must be equal on all ranks of optimizers.
        drift: compares what is the same on all ranks of their parameters, from then on.
        deployment: the deployment's number, equal on all ranks; 0 before.
    """

    def __init__(
        self,
        model: nn.Module,
        variants: Variants,
        optimizer: Optimizer | None,
        batch: BatchArguments,
        *,
        gather_inputs: bool,
        recaptures: Recaptures,
        course: Callable[[Optimizer], Course],
    ) -> None:
        self.params: ParamGuards | None = None
        self.drift = Drift()
        self.deployment = 0
        self._model = model
        self._variants = variants
        self.hyper_parameters = HyperParameters(optimizer, course)
        self._batch = batch
        self._gather_inputs = gather_inputs
        self._recaptures = recaptures
        self._answers: Answers | None = None
        self._drawn: int | None = None

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> AgreedCall | None:
        """Finds out that all ranks make the same call, each with a batch of its own. All ranks call it.

        Returns:
            None when ``requires_grad`` of some parameter has changed on a rank, and nothing else was found out.

        Raises:
            InputError: a tensor is on the wrong device, the arguments have no batch, or what the capture took for
                granted does not hold.
            MismatchError: the ranks disagree.
        """
        own = _Own(Arguments.of(args, kwargs))
        everyone = self._tell(own, device)
        if everyone is None:
            return None
        counts, doubt = [count for _, count, *_ in everyone], None
        if own.per_row is None:
            own.per_row, doubt = self._batch.find(own.call, device)
            own.rows, own.key = own.call.rows(own.per_row), self._key(own.call, own.per_row)
            counts = [count for (count,) in agree.gather_numbers((own.rows,))]
        rows = tuple(count if self._gather_inputs or rank == 0 else 0 for rank, count in enumerate(counts))
        if sum(rows) == 0:
            raise InputError("the global batch has no rows: every rank's inputs are empty")
        if self.deployment:
            self.drift.follow()
        batch = BatchRows(rows, self._gather_inputs)
        drawn = self._take_form(own, batch, everyone[0][-1])
        if own.variant is None and doubt is None:
            doubt = self._batch.still_in_doubt(own.call, device)
        if own.variant is not None and self._recaptures.is_due(own.variant):
            self._recaptures.compare(own.variant, Sample(self._model, args, kwargs, device, own.rows, own.per_row))
        with no_autocast():
            to_ask = None if own.is_answered else own.variant
            self._answers = None if to_ask is None else self._ask(to_ask, own, batch)
        return AgreedCall(
            own.key, own.variant, own.call.tensors, own.per_row, own.rows, batch, self._answers, drawn, doubt
        )

    def _tell(self, own: _Own, device: torch.device) -> list[tuple[int, ...]] | None:
        """Fills ``own``, and tells it all ranks; returns what each has told. All ranks call it.

        Returns:
            None when ``requires_grad`` of some parameter has changed on a rank.
        """
        failure: Exception | None = None
        try:
            self._examine(own, device)
        except Exception as error:
            failure = error
            own.number = _FAILED
        everyone = agree.gather_numbers((own.number, own.rows, _switched(), combined(own.equal), own.drawn))
        numbers = {number for number, *_ in everyone}
        if _FAILED in numbers:
            agree.raise_together(failure)
        if _THAWED in numbers:
            self._drawn = own.drawn or None
            return None
        if len({(number, switched) for number, _, switched, *_ in everyone}) > 1:
            raise MismatchError(_different_calls(self._model, own.call.tensors))
        if len({equal for *_, equal, _ in everyone}) > 1:
            self._compare_values(own.equal)
        return everyone

    def _take_form(self, own: _Own, batch: BatchRows, drawn: int) -> int:
        """Takes another captured form where the rows of the batch, or what buffers answer, ask for one.

        All ranks call it.

        Args:
            drawn: what the call draws from if the captured form stays.

        Returns:
            what it draws from.
        """
        found = own.variant
        with no_autocast():
            if found is not None and not found.stands_for(batch.total):
                self._take_for_rows(own, batch.total)
            if own.variant is not None and own.variant.questions.of_buffers:
                own.variant = self._as_answered(own, batch)
            if own.variant is found:
                return drawn
            self._drawn = own.drawn or None
            return drawn if own.variant is None else agree.broadcast_object(self.draw(own.variant))

    def _compare_values(self, own: Sequence[Fingerprint]) -> None:
        """Raises MismatchError, unless the ranks differ in no more than what steps of optimizers set.

        All ranks call it.
        """
        everyone: list[tuple[Sequence[Fingerprint], frozenset[str]]]
        everyone = agree.gather_objects((own, self.hyper_parameters.set_by_steps()))
        left_out = frozenset().union(*(words for _, words in everyone))
        compared = [[(words, number) for words, number in found if words not in left_out] for found, _ in everyone]
        if any(found != compared[0] for found in compared):
            raise MismatchError(_different_values(compared))
        self.hyper_parameters.leave_out(left_out)

    def _take_for_rows(self, own: _Own, rows: int) -> None:
        """Takes the captured form for so many rows, if there is one. All ranks call it."""
        own.others = [form for form in own.others if form.stands_for(rows)]
        own.variant = own.others.pop(0) if own.others else None
        numbers = agree.gather_numbers((_NEW if own.variant is None else own.variant.number,))
        if len(set(numbers)) > 1:
            raise MismatchError(_different_calls(self._model, own.call.tensors))
        if own.variant is not None:
            changed = own.variant.whole.captured.changed_inputs
            agree.together(lambda: refuse_shared(own.call.tensors, changed))

    def _as_answered(self, own: _Own, batch: BatchRows) -> Variant | None:
        """The captured form with the answers that buffers give now, if there is one. All ranks call it.

        Where other data decide too, or there are many of them already, it is the latest.
        """
        assert own.variant is not None, "it asks buffers"
        forms = [own.variant, *(form for form in own.others if form.stands_for(batch.total))]
        for form in forms:
            told = agree.gather_numbers((len(forms), form.number, self._answered(form, own, batch)))
            if len({(count, number) for count, number, _ in told}) > 1:
                raise MismatchError(_different_calls(self._model, own.call.tensors))
            answered = max(found for *_, found in told)
            if answered == _AS_CAPTURED:
                own.is_answered = True
                return form
            if answered == _BY_OTHERS:
                return forms[0]
        return None if len(forms) < _MOST_ANSWERED else forms[0]

    @staticmethod
    def _answered(form: Variant, own: _Own, batch: BatchRows) -> int:
        questions = form.questions
        assert own.per_row is not None, "a captured form has rows"
        others = [*questions.ask(batch.joined(own.call.tensors, own.per_row, questions.takes)).others()]
        decided = all(question.buffers and assumption.decides for assumption, question in others)
        if not questions.known or not decided:
            return _BY_OTHERS
        return _BY_BUFFERS if others else _AS_CAPTURED

    @staticmethod
    def _ask(variant: Variant, own: _Own, batch: BatchRows) -> Answers | None:
        """The answers that are still to be checked. All ranks call it."""
        questions = variant.questions
        if not questions:
            return None
        assert own.per_row is not None, "a captured form has rows"
        answers = questions.ask(batch.joined(own.call.tensors, own.per_row, questions.takes))
        if not questions.waits and torch.is_grad_enabled():
            return answers
        # There is no backward that could wait for them.
        agree.together(answers.check)
        return None

    def _key(self, call: Arguments, per_row: PerRow) -> CallKey:
        return signature(self._model, call.tensors, call.structure, per_row), self.flags

    def _examine(self, own: _Own, device: torch.device) -> None:
        """Fills ``own``, and raises what this rank finds wrong."""
        answers, self._answers = self._answers, None
        if answers is not None:
            answers.check()
        call = own.call
        _check_inputs(call.tensors, device)
        per_row = own.per_row = self._batch.known(call)
        if per_row is None:
            self._batch.check(call)
        else:
            own.rows = call.rows(per_row)
        if self.params is not None and not self.params.check():
            own.number = _THAWED
            return
        own.equal = [(_WHICH, self.deployment), *self.hyper_parameters.fingerprints()]
        if per_row is None:
            own.number = _UNDECIDED
            return
        own.key = self._key(call, per_row)
        forms = self._variants.that_hold(own.key)
        own.variant = next(forms, None)
        if own.variant is not None and (own.variant.questions.of_buffers or own.variant.asks_rows):
            own.others = [*forms]
        calls = 0 if own.variant is None else own.variant.calls
        if self._gather_inputs and process.get_world_size() > 1:
            own.equal = own.equal + whole_inputs(call.tensors, lambda: call.names, per_row, calls)
        if own.variant is None:
            return
        refuse_shared(call.tensors, own.variant.whole.captured.changed_inputs)
        own.number, own.drawn = own.variant.number, self.draw(own.variant)

    def draw(self, variant: Variant) -> int:
        """What a call is to draw from, a number from torch's generator if it needs one: one number for each call."""
        drawn, self._drawn = self._drawn, None
        return variant.draw() if drawn is None else drawn

    @property
    def flags(self) -> Hashable:
        """Which parameters require gradients, equal on all ranks."""
        return None if self.params is None else self.params.flags


@dataclass
class _Own:
    """What this rank has found out about its call.

    Attributes:
        others: captured forms beside ``variant`` that may serve it, as buffers answer or for other rows.
        is_answered: all questions of ``variant`` have been asked, and have the answers of the capture.
    """

    call: Arguments
    per_row: PerRow | None = None
    number: int = _NEW
    rows: int = 0
    key: CallKey = ((), None)
    variant: Variant | None = None
    others: list[Variant] = field(default_factory=list)
    is_answered: bool = False
    equal: list[Fingerprint] = field(default_factory=list)
    drawn: int = 0


def _check_inputs(tensors: list[Tensor], device: torch.device) -> None:
    for index, tensor in enumerate(tensors):
        why = why_not_dense(tensor)
        if why:
            raise InputError(f"tensor {index} of the arguments is {why}")
        if tensor.device != device:
            raise InputError(
                f"tensor {index} of the arguments (shape {tuple(tensor.shape)}) is on {tensor.device}, but this "
                f'rank computes on {device}; move it there: x.to("{device}")'
            )


def _switched() -> int:
    """What else must be the same on all ranks for a call, as one number."""
    switched = torch.is_grad_enabled() + 2 * switches().delay_grad_allreduce + 4 * switches().keep_graph
    return switched + 8 * Autocast.now().number()


def _different_calls(model: nn.Module, tensors: list[Tensor]) -> str:
    mode = "training mode" if model.training else "evaluation mode"
    if not torch.is_grad_enabled():
        mode += " without gradients"
    if (autocast := Autocast.now()).dtypes:
        mode += f", under torch.autocast ({autocast})"
    shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
    described: list[str] = agree.gather_objects(f"{shapes}, in {mode}")
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(described)]
    return (
        "the ranks call the model with arguments of different shapes, types or Python values, in different modes, or "
        "with different Python attributes of its sub-modules; pad rows to a length that all ranks agree on, make one "
        "tensor of a list with an item for each row, and call the model alike on all ranks:\n" + "\n".join(lines)
    )


def _different_values(everyone: Sequence[Sequence[Fingerprint]]) -> str:
    """Names the first thing that has another value on another rank."""
    first = dict(everyone[0])
    for rank, found in enumerate(map(dict, everyone)):
        for words in [*first, *found]:
            if first.get(words) != found.get(words):
                return (
                    f"{words} has another value on rank {rank} than on rank 0; give all ranks the same one (what "
                    "differs from row to row is a tensor with the batch as dimension 0)"
                )
    return "the ranks pass different numbers of tensors without rows, or have different optimizers"
