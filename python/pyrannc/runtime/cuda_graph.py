"""A run recorded as CUDA graphs: the host launches it in one call, whatever is in it.

What a recording reads and writes keeps its place: inputs are copied to it, outputs from it. Random numbers come from
a key on the device (``blocks/recorded.py``), so that a replay draws what the Actions would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pyrannc.blocks.recorded import Place, RecordedDraws
from pyrannc.capture.torch_internals.gradients import copy_each
from pyrannc.capture.torch_internals.graphs import Graph
from pyrannc.capture.torch_internals.tensors import version
from pyrannc.errors import RaNNCError
from pyrannc.runtime.batch import OfBatch
from pyrannc.runtime.clock import Clock
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.run import OfOutputs, Run, Task
from pyrannc.runtime.timing import StepMarks
from pyrannc.store.gradient_set import GradientSet


class Places:
    """Tensors that keep their place.

    Args:
        like: what comes first, by anything; what is one tensor there may be two later.
    """

    def __init__(self, like: Mapping[Any, Tensor]) -> None:
        self.tensors = {key: torch.empty_like(tensor) for key, tensor in like.items()}
        # Autograd would take new contents for a change of what a forward has saved.
        self._contents = {key: tensor.data for key, tensor in self.tensors.items()}

    def fits(self, tensors: Mapping[Any, Tensor]) -> bool:
        """True where tensors may be taken in."""
        return tensors.keys() == self.tensors.keys() and all(
            tensor.shape == self.tensors[key].shape and tensor.dtype == self.tensors[key].dtype
            for key, tensor in tensors.items()
        )

    def take(self, tensors: Mapping[Any, Tensor]) -> None:
        """Takes contents in."""
        if tensors:
            copy_each([self._contents[key] for key in tensors], [tensor.detach() for tensor in tensors.values()])


@dataclass
class Seen:
    """What is seen of a run before it is recorded.

    Attributes:
        places: for what it sets the device's generator.
        grads: where the criterion is outside, the gradients of outputs, without contents.
        reached: likewise, the Values through which gradients flow.
        growth_bytes: the most memory that it had at a time besides what was there before; 0 where that is not known.
    """

    places: list[Place] = field(default_factory=list)
    grads: OfOutputs = field(default_factory=dict)
    reached: Set[int] = frozenset()
    growth_bytes: int = 0


class Recording:
    """A recorded run.

    Args:
        task: what runs.
        inputs: as of the first replay.
        inside: likewise, the tail's gradients with which backwards inside the call start.
        current: where gradients go.
        seen: what was seen of the run before.
        pool: whose memory it takes.
        block_bytes: the pool begins with one block of that size; 0: with pieces as they are asked for.

    Attributes:
        current: as given.
        task: as given.
    """

    def __init__(
        self,
        task: Task,
        inputs: OfBatch,
        inside: Mapping[int, Tensor],
        current: GradientSet | None,
        seen: Seen,
        pool: Any,
        block_bytes: int,
    ) -> None:
        self.task = task
        self.current = current
        context, device = task.context, task.context.device
        self._inputs, self._inside = Places(inputs), Places(inside)
        self._inputs.take(inputs)
        self._inside.take(inside)
        self._pool = pool
        self._draws = RecordedDraws(seen.places, device)
        self.clock = Clock(task.program, context.record, device)
        self._graph, self._backward = Graph(), Graph()
        self._grads = Places({key: torch.empty_like(like, device=device) for key, like in seen.grads.items()})
        self.run = Run(task, self.clock, lends=False)
        # Copies that earlier calls were lent move now if at all.
        context.gradients.working.refresh(context.copied.values())
        versions_before = [version(tensor) for tensor in context.buffers.values()]
        program = task.program
        with self._recording(self._graph), self.clock.graph(program.forward, 0):
            torch.empty(block_bytes, dtype=torch.uint8, device=device)
            self.run.forward(self._inputs.tensors, self._inside.tensors, current)
        if program.call == "halves":
            self.run.begin_backward(lambda: current)
            with self._recording(self._backward), self.clock.graph(program.backward, len(program.forward)):
                self.run.backward(self._grads.tensors, seen.reached, keep_graph=False, reduce=True)
        self._forms = {value: pieces.like() for value, pieces in self.run.outputs.items()}
        self._changed = [
            tensor
            for tensor, before in zip(context.buffers.values(), versions_before, strict=True)
            if version(tensor) != before
        ]
        self._found = _found(task)
        # The recording has counted the changes that the first launch makes.
        self._is_launched = False
        self.clock.announce()

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        self._draws.register(graph)
        with (
            self.task.context.randomness.recorded(self._draws),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            stream = torch.cuda.current_stream()
            yield
        # torch has set the generators for the recording there, unrecorded: seeds of a replay come after that.
        torch.cuda.current_stream().wait_stream(stream)

    def serves(self, inputs: OfBatch, inside: Mapping[int, Tensor]) -> bool:
        """True where a replay would be the run of a call."""
        return self._inputs.fits(inputs) and self._inside.fits(inside)

    @property
    def is_stale(self) -> bool:
        """True when parameters or buffers have moved since, or torch told to compute otherwise."""
        return _found(self.task) != self._found

    def replay(self, inputs: OfBatch, inside: Mapping[int, Tensor]) -> None:
        """Launches the call's run."""
        self._inputs.take(inputs)
        self._inside.take(inside)
        self.task.context.randomness.begin_replay(self._draws)
        self._launch()

    def _launch(self) -> None:
        self._graph.replay()
        self.clock.count_launch()
        if self._is_launched and self._changed:
            increment_version(self._changed)
        self._is_launched = True

    @property
    def output_bytes(self) -> int:
        """Of memory for what a replay gives."""
        return sum(form.nbytes for form in self._forms.values())

    def room_for_outputs(self) -> OfBatch:
        """Memory for what a replay gives."""
        # torch takes ten times as long to make one like a tensor without contents.
        device = self.task.context.device
        return {
            value: torch.empty_strided(form.size(), form.stride(), dtype=form.dtype, device=device)
            for value, form in self._forms.items()
        }

    def give(self, room: OfBatch) -> None:
        """Copies the outputs of the last replay to there."""
        # Joined here they need no memory in the graph besides.
        places = [place for value, whole in room.items() for place in self.run.outputs[value].places_in(whole)]
        if places:
            copy_each(places, [piece.detach() for value in room for piece in self.run.outputs[value].tensors])

    @property
    def changes_buffers(self) -> bool:
        """True when a run is not to be repeated for one call."""
        return bool(self._changed)

    def repeat(self) -> None:
        """Launches the run of the call once more: what its backward needs comes back."""
        self.clock.take_back_launch()
        self.task.context.randomness.begin_replay(self._draws, self._draws.key.number)
        self._launch()

    def fits_backward(self, grads: OfOutputs) -> bool:
        """True where the recorded backward starts with these gradients."""
        return self._grads.fits(grads)

    def replay_backward(self, grads: OfOutputs) -> None:
        """Launches the backwards."""
        self._grads.take(grads)
        self._backward.replay()

    def reset(self) -> None:
        """Gives back the graphs and their memory."""
        self._graph.reset()
        self._backward.reset()
        self.clock.retire()


class Replay:
    """A run that is a replay, of one call.

    Args:
        recording: of what.
        inputs: the rank's own.
        inside: the tail's gradients with which backwards inside the call start, by Value.
        outputs: where its outputs go.
        marks: where to note when computations ran.
    """

    def __init__(
        self,
        recording: Recording,
        inputs: OfBatch,
        inside: Mapping[int, Tensor],
        outputs: OfBatch,
        marks: StepMarks | None,
    ) -> None:
        self._recording = recording
        self._marks = marks
        context, program = recording.task.context, recording.task.program
        self._versions = versions(context) if program.call == "halves" else []
        self._is_again = False
        context.record.enter_replay(program)
        if marks is not None:
            # Marks are kept for longer than recordings.
            marks.replayed(partial(recording.clock.read, recording.clock.next_row))
        recording.replay(inputs, inside)
        if program.call == "whole":
            self._finish_marks()
        context.record.enter_outputs(program)
        # The next replay writes to where they are.
        recording.give(outputs)
        self.outputs = outputs
        self.kept: Set[int] = frozenset()
        self.current: GradientSet | None = recording.current

    def _finish_marks(self) -> None:
        if self._marks is not None:
            self._marks.finish()

    def take_outputs(self) -> OfBatch:
        """The outputs, which the run lets go of."""
        taken, self.outputs = self.outputs, {}
        return taken

    @property
    def input_grads(self) -> OfBatch:
        """Of the rank's own inputs."""
        # The next replay writes to where they are.
        return {value: grad.clone() for value, grad in self._recording.run.input_grads.items()}

    def begin_backward(self, find: Callable[[], GradientSet | None]) -> GradientSet:
        """Room for the gradients of backwards to come."""
        del find  # they go where they were recorded
        assert self.current is not None, "it trains"
        return self.current

    def backward(self, grads: OfOutputs, reached: Set[int], *, keep_graph: bool, reduce: bool) -> None:
        """Runs the backwards of a call with its criterion outside.

        Raises:
            RaNNCError: it is not the backward that was recorded.
        """
        del reached, keep_graph
        why = self._why_not_recorded(grads, reduce=reduce)
        if why:
            raise RaNNCError(
                "the call of the model was replayed as a CUDA graph, and this backward is another than was recorded: "
                f"{why}; set RANNC_CUDA_GRAPHS=off"
            )
        task = self._recording.task
        task.context.record.enter_replay(task.program)
        if self._is_again:
            self._backward_again(grads)
        else:
            self._recording.replay_backward(grads)
        self._is_again = True
        self._finish_marks()

    def _why_not_recorded(self, grads: OfOutputs, *, reduce: bool) -> str:
        """Why a backward is not the one that was recorded; empty if it is."""
        if not reduce:
            return "its gradients are not to be summed over ranks yet"
        if not self._recording.fits_backward(grads):
            return "gradients came back for other outputs than at the calls before"
        if versions(self._recording.task.context) != self._versions:
            return "parameters have changed between the call of the model and its backward"
        if self._is_again and self._recording.changes_buffers:
            return "it comes a second time for one call, and the model changes buffers"
        return ""

    def _backward_again(self, grads: OfOutputs) -> None:
        """Of a call whose gradients a script may hold already, where the recording writes to."""
        current = self._recording.current
        assert current is not None, "it trains"
        held = current.copy()
        self._recording.repeat()
        self._recording.replay_backward(grads)
        self.current = current.copy()
        current.take(held)

    def release(self) -> None:
        """Drops outputs."""
        self.outputs = {}


def _found(task: Task) -> list[object]:
    """Where a run finds parameters and buffers, and torch's switches."""
    context = task.context
    held = [bucket.own for bucket in context.gradients.gathered.values()]
    addresses = map(Tensor.data_ptr, (*context.params.values(), *context.buffers.values(), *held))
    switches = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    return [*addresses, *switches]


def compiled_for(task: Task) -> list[object]:
    """The compiled code with which a run computes."""
    return task.context.code.compiled_for({hi - lo for lo, hi in task.program.rows})


def versions(context: StageContext) -> list[object]:
    """Of the parameters that a backward may find changed: what changes one in place changes its version."""
    used = [leaf for value, leaf in context.params.items() if value not in context.copied]
    return [*map(version, used), *(bucket.version for bucket in context.gradients.gathered.values())]
