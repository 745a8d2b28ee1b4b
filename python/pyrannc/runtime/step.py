"""One call of the model: inputs in, the Actions, outputs back, gradients when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyrannc.call.variant import Variant
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture.nodes.autocast import no_autocast
from pyrannc.core.partition import OutputPart, RowDim
from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.job.faults import collective
from pyrannc.log import get_logger
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.givers import Giving, Leaves, sources
from pyrannc.runtime.handover import hand_over, no_view
from pyrannc.runtime.join import Joiner
from pyrannc.runtime.loss import Weights, scale_of
from pyrannc.runtime.recording import Recordings
from pyrannc.runtime.run import AnyRun, Run, Task
from pyrannc.runtime.tail import TailStep
from pyrannc.runtime.timing import StepMarks
from pyrannc.store.gradient_set import GradientSet
from pyrannc.switches import switches

_log = get_logger("RaNNCModule")


@dataclass(frozen=True)
class StepOptions:
    """How a step treats gradients.

    Attributes:
        reduce: sum gradients over ranks, where the backward runs inside of the call.
        keep_graph: backward may be called again, however it was called.
        leaves: what inputs may have been computed from.
    """

    reduce: bool
    keep_graph: bool
    leaves: Leaves = field(default_factory=Leaves)


class Step:
    """One call on one rank.

    Args:
        context: the rank's Stage.
        program: what the rank does.
        inputs: the local tensors, in the order of the Graph's inputs.
        key: what random numbers come from, equal on all ranks.
        variant: the captured call.
        options: how its backward runs.
        rows: of the global batch.
        before_backward: given the gradients of the distinct outputs; raises, on all ranks, when there must be none.
        recordings: of runs as CUDA graphs; without them the Actions are carried out one after another.

    Attributes:
        gives: what a call that takes this one's outputs must know.
    """

    def __init__(
        self,
        context: StageContext,
        program: RankProgram,
        inputs: Sequence[Tensor],
        key: int,
        variant: Variant,
        options: StepOptions,
        rows: BatchRows,
        before_backward: Callable[[Sequence[Tensor | None]], None] = lambda _: None,
        recordings: Recordings | None = None,
    ) -> None:
        self._context = context
        self._program = program
        self._inputs = dict(zip(context.facts.inputs, inputs, strict=True))
        self._whole_inputs = dict(zip(variant.whole.facts.inputs, inputs, strict=True))
        self._rows = rows
        self._joiner = Joiner(rows, context.device)
        self._variant = variant
        self._loss = variant.loss if program.call == "whole" else None
        self._options = options
        self._before_backward = before_backward
        self._recordings = recordings
        self._input_grads: dict[int, Tensor] = {}
        self._tail_grads: dict[int, Tensor] = {}
        self._outputs: tuple[int, ...] = ()
        used = variant.reached(frozenset(variant.whole.facts.outputs))
        self._sources = tuple(
            value for value, tensor in self._inputs.items() if tensor.requires_grad and variant.whole_of[value] in used
        )
        self._wanted = frozenset(() if self._loss is None else (self._loss,))
        self._done = False
        self._summed = False
        self._active: frozenset[str] = frozenset()
        self._made = _made(context.parts.outputs)
        loss = None if self._loss is None else variant.body_of.get(self._loss)
        self._weights = Weights(context.facts, program, self._made, variant.joins, context.device, loss)
        own_weight = self._weights.of_local_batch
        self._makers = sources(self._inputs, context.facts, program, own_weight, options.leaves)
        self.gives = Giving(program.call == "whole", program.gather_inputs, self._weights.of_local_batch)
        context.randomness.begin(key)
        marks = context.timing.begin(program)
        with context.record.step(program), self._generator():
            self._tail = self._begin_tail()
            inside = self._gradients_inside()
            self._run = self._begin_run(inside, marks)
            outputs = self._run.take_outputs()
            made = [outputs[part.value] for part in self._made]
            self._shapes = [(tensor.shape, tensor.dtype) for tensor in made]
            self._values = self._run_tail(made)
            if program.call == "whole":
                self._finish_gradients()
                self._summed = options.reduce

    def _generator(self) -> Any:
        context = self._context
        if not context.seeds_generator:
            return nullcontext()
        return context.randomness.borrowed(others=context.seeds_others)

    def _begin_run(self, inside: Mapping[int, Tensor], marks: StepMarks | None) -> AnyRun:
        task = Task(self._context, self._program, self._weights, self._options.reduce)
        if self._recordings is not None and not self._options.keep_graph:
            recorded = self._recordings.run(self, self._variant, task, self._inputs, inside, marks)
            if recorded is not None:
                return recorded
        run = Run(task, marks)
        run.forward(self._inputs, inside, self._find_room() if self._program.call == "whole" else None)
        return run

    def _find_room(self) -> GradientSet | None:
        """A place for gradients, where recordings have some; their own are not kept then besides."""
        return None if self._recordings is None else self._recordings.lend_room(self, self._context)

    @property
    def is_open(self) -> bool:
        """True while a backward of it may come."""
        return not self._done and self._program.call != "forward"

    def _begin_tail(self) -> TailStep | None:
        context = self._context
        if context.tail is None:
            return None
        return TailStep(context.tail, self._rows, self._joiner, self._whole_inputs, context.device)

    def _gradients_inside(self) -> dict[int, Tensor]:
        """The tail's gradients with which backwards inside the call start, by Value of the body."""
        if self._loss is None or self._tail is None:
            return {}
        body_of, grads = self._variant.body_of, self._tail.gradients_of(self._loss)
        self._tail_grads = {
            body_of[value]: self._of_first_rank(grad) for value, grad in grads.items() if value in self._whole_inputs
        }
        return {body_of[value]: grad for value, grad in grads.items()}

    def _run_tail(self, made: Sequence[Tensor]) -> dict[int, Tensor]:
        """The distinct outputs of the call that are no inputs, by Value of the whole."""
        whole_of = self._variant.whole_of
        found = {whole_of[part.value]: tensor for part, tensor in zip(self._made, made, strict=True)}
        if self._tail is not None:
            found.update(self._tail.run(found, trains=self._program.call == "halves"))
        return {value: found[value] for value in dict.fromkeys(self._variant.whole.facts.outputs) if value in found}

    def results(self) -> list[Tensor]:
        """The outputs, in the order of the Graph's outputs, with gradients if the call trains."""
        # The step must not keep what it returns: the autograd graph of that keeps the step.
        made, self._values = self._values, {}
        self._outputs = tuple(made)
        if self._program.call != "forward":
            kept = self._run.kept
            own = {value: self._apart(value, tensor, kept) for value, tensor in made.items()}
            active = None if self._variant.chooses_params else self._variant.active.get(self._wanted)
            delivery = self._context.gradients.delivery
            params, leaf = delivery.token(active), delivery.one_leaf
            sources = [self._inputs[value] for value in self._sources]
            handed = hand_over(list(own.values()), self._constant(own), sources, params, leaf, self.backward)
            made = dict(zip(made, handed, strict=True))
        values = {**self._whole_inputs, **made}
        if self._program.call != "halves":
            self._let_go_of_batch()
        return [values[value] for value in self._variant.whole.facts.outputs]

    def _let_go_of_batch(self) -> None:
        """Drops what only a backward needs that has been run: the script may keep the loss."""
        self._inputs, self._whole_inputs = {}, {}
        self._run.release()
        if self._tail is not None:
            self._tail.release()

    def _apart(self, value: int, tensor: Tensor, kept: Set[int]) -> Tensor:
        """An output that the script may change in place: a backward to come needs what the tail has and ``kept``."""
        of_tail = self._tail is not None and value not in self._variant.body_of
        if self._program.call == "halves" and (of_tail or tensor.untyped_storage().data_ptr() in kept):
            return tensor.clone()
        return no_view(tensor)

    def _constant(self, made: Mapping[int, Tensor]) -> list[Tensor]:
        """The outputs that no gradient comes back for."""
        facts = self._variant.whole.facts.values
        return [tensor for value, tensor in made.items() if not facts[value].requires_grad]

    @no_autocast()
    def backward(self, grads: Sequence[Tensor | None], *, keep_graph: bool, for_params: bool) -> list[Tensor | None]:
        """Sends gradients on to the parameters, given those of the distinct outputs; returns those of the inputs."""
        self._refuse_backward()
        keep = keep_graph or self._options.keep_graph
        self._done = not keep
        self._before_backward(grads)
        reduce = not switches().delay_grad_allreduce
        by_value = dict(zip(self._outputs, grads, strict=True))
        scale = None if self._loss is None else scale_of(by_value, self._loss, self._variant.whole.facts)
        if scale is None:
            self._tell_of_outside(by_value)
            self._run_backward(by_value, keep_graph=keep, reduce=reduce)
            self._summed = reduce
        if for_params:
            self._deliver(scale, keep=keep and scale is not None, sum_now=reduce)
        reached = self._variant.reached(self._wanted)
        found = [
            self._input_grads.get(value) if self._variant.whole_of[value] in reached else None
            for value in self._sources
        ]
        scaled = [grad if grad is None or scale is None else grad * scale.to(grad.dtype) for grad in found]
        given = [self._for_maker(value, grad) for value, grad in zip(self._sources, scaled, strict=True)]
        if not keep:
            self._input_grads, self._makers, self._run.current = {}, {}, None
            self._let_go_of_batch()
        return given

    def _refuse_backward(self) -> None:
        if self._done:
            raise RaNNCError(
                "backward() was called a second time for one call of the model; if that is meant, call "
                "backward(retain_graph=True) the first time, or pyrannc.keep_graph(True) before the model"
            )
        if self._context.channels.closed:
            raise RaNNCError(
                "backward() came after the model was taken back by undeploy(), or deployed anew for a call that uses "
                "other parameters; call backward() before that"
            )

    def _deliver(self, scale: Tensor | None, *, keep: bool, sum_now: bool) -> None:
        current = self._run.current
        assert current is not None, "a call that trains has gradients"
        self._context.gradients.deliver(current, self._active, scale, keep=keep, summed=self._summed, sum_now=sum_now)
        self._summed = self._summed or sum_now

    def _for_maker(self, value: int, grad: Tensor | None) -> Tensor | None:
        """Of an input whose maker gives gradients a weight, the gradient of the local loss."""
        maker = self._makers.get(value)
        return grad if grad is None or maker is None else maker.gradient_of_local_loss(grad)

    def _tell_of_outside(self, grads: Mapping[int, Tensor | None]) -> None:
        """Says once what a criterion outside of the model means."""
        variant = self._variant
        outside = any(grad is not None and value != variant.loss for value, grad in grads.items())
        if outside and not variant.told_outside and self._program.gather_inputs and process.get_world_size() > 1:
            variant.told_outside = True
            if process.get_rank() == 0:
                _log.warning(
                    "the criterion is outside of the model: the loss is the mean of the ranks' local losses, weighted "
                    "by their rows. A sum, or a mean over tokens, is then not that of the global batch: compute it "
                    "inside the model if that is meant"
                )

    def _run_backward(self, grads: Mapping[int, Tensor | None], *, keep_graph: bool, reduce: bool) -> None:
        context, program = self._context, self._program
        with collective("loss.backward()"), context.record.step(program), self._generator():
            self._wanted = self._find_wanted(grads)
            reached = self._variant.reached_in_body(self._wanted)
            self._run.begin_backward(self._find_room)
            of_outputs = self._output_grads(grads, reached, keep_graph=keep_graph)
            self._run.backward(of_outputs, reached, keep_graph=keep_graph, reduce=reduce)
            self._finish_gradients()

    def _find_wanted(self, grads: Mapping[int, Tensor | None]) -> frozenset[int]:
        """The outputs that a gradient came back for, on some rank. All ranks call it."""
        facts = self._variant.whole.facts.values
        able = [value for value in self._outputs if facts[value].requires_grad]
        if len(able) == 1:
            return frozenset(able)
        everyone = agree.gather_numbers(tuple(int(grads.get(value) is not None) for value in able))
        return frozenset(value for value, came in zip(able, zip(*everyone, strict=True), strict=True) if any(came))

    def _output_grads(
        self, grads: Mapping[int, Tensor | None], reached: Set[int], *, keep_graph: bool
    ) -> dict[int | tuple[int, int], Tensor]:
        """The gradients that the backwards of all Stages begin with, as far as they are this rank's."""
        own_grads = [grads.get(self._variant.whole_of[part.value]) for part in self._made]
        own = self._weights.own_gradients(own_grads, self._shapes, reached)
        self._differentiate_tail(grads, own, reached, keep_graph=keep_graph)
        seeds = self._weights.seeds_of_totals(own)
        found: dict[int | tuple[int, int], Tensor] = dict(seeds.items())
        if self._program.gather_inputs:
            dims = {part.value: part.row_dim for part in self._made}
            found.update((value, grad) for value, grad in own.items() if dims[value] is not None)
        else:
            found.update(self._weights.local_seeds(own).items())
        return found

    def _differentiate_tail(
        self, grads: Mapping[int, Tensor | None], own: dict[int, Tensor], reached: Set[int], *, keep_graph: bool
    ) -> None:
        """Adds the tail's gradients to those of the body's outputs, and gives parameters theirs.

        Every rank has a loss of its own, even if they are equal: they count as much as the rows.
        """
        self._tail_grads = {}
        if self._tail is None:
            return
        context, weight = self._context, self._weights.of_local_batch
        assert context.tail is not None, "the call has a tail"
        current = self._run.current
        assert current is not None, "the backward has begun"
        found = self._tail.backward(grads, keep_graph=keep_graph)
        for item in context.tail.part.joined:
            if item.value not in found.joined or self._variant.body_of[item.value] not in reached:
                continue
            grad = found.joined[item.value] * weight
            body = self._variant.body_of[item.value]
            if item.value in self._whole_inputs:
                self._tail_grads[body] = self._of_own_input(grad, item.join)
            elif isinstance(item.join, RowDim):
                own[body] = own[body] + self._tail.own_rows_of_sum(grad, item.join)
            else:
                own[body] = own[body] + grad
        # Where every rank has the same loss, it counts once.
        counts = self._program.gather_inputs or process.get_rank() == 0
        for value, total in found.params.items():
            name = context.tail.names[value]
            last = name not in context.stage_params
            own_grad = None if total is None else total * (weight if counts else 0.0)
            context.gradients.add(current, name, own_grad, last=last)

    def _of_own_input(self, grad: Tensor, join: object) -> Tensor:
        assert self._tail is not None, "it has gradients"
        # What is the same for all rows is rank 0's, and so is the batch if not all ranks bring their own.
        if not isinstance(join, RowDim):
            return self._of_first_rank(self._joiner.summed(grad))
        rows = self._tail.own_rows_of_sum(grad, join)
        return rows if self._program.gather_inputs else self._of_first_rank(rows)

    @staticmethod
    def _of_first_rank(grad: Tensor) -> Tensor:
        return grad if process.get_rank() == 0 else torch.zeros_like(grad)

    def _finish_gradients(self) -> None:
        self._input_grads = {**self._zeros_of_inputs(), **self._run.input_grads}
        for value, grad in self._tail_grads.items():
            self._input_grads[value] = self._input_grads[value] + grad
        if self._wanted not in self._variant.active or self._variant.chooses_params:
            assert self._run.current is not None, "the backward has begun"
            found: list[set[str]] = agree.gather_objects(set(self._run.current.touched()))
            self._variant.active[self._wanted] = frozenset(self._reached_params() & set().union(*found))
        self._active = self._variant.active[self._wanted]

    def _zeros_of_inputs(self) -> dict[int, Tensor]:
        return {value: torch.zeros_like(tensor) for value, tensor in self._inputs.items() if tensor.requires_grad}

    def _reached_params(self) -> set[str]:
        reached = self._variant.reached(self._wanted)
        return {param.names[0] for param in self._variant.whole.facts.params if param.value in reached}


def _made(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """The outputs that some Stage makes, each once."""
    return list({part.value: part for part in parts if part.input is None}.values())
