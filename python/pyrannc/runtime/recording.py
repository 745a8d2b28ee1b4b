"""Which runs are recorded as CUDA graphs, and which calls are replays.

The first run of a program is watched for what a graph cannot hold, and the second again where the first waited for the
device, as it may to fill caches. Then runs are replays. Each rank decides by itself: a message from a graph meets one
from outside of it.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyrannc.call.variant import Variant
from pyrannc.capture.torch_internals.devices import before_groups_end
from pyrannc.errors import first_line
from pyrannc.job import process
from pyrannc.job.device_memory import left_bytes
from pyrannc.log import get_logger
from pyrannc.runtime.batch import OfBatch
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.cuda_graph import Recording, Replay, compiled_for
from pyrannc.runtime.run import AnyRun, Task
from pyrannc.runtime.timing import StepMarks
from pyrannc.runtime.watched_run import Caller, Known, WatchedRun, why_not
from pyrannc.store.gradient_set import GradientSet

_log = get_logger("RaNNCModule")
_MOST_PROGRAMS = 8
"""Whose runs are recorded: a script whose batches never have the same size would record at each step."""
_MOST_ROOMS = 2
"""Sets of gradients: while a script holds one, the next is filled."""
_MOST_TIMES = 3
"""A program is recorded so often, if its parameters move."""


class _Room:
    """Where recordings put gradients, and runs that are none."""

    def __init__(self, gradients: GradientSet) -> None:
        self.gradients = gradients
        self._user: weakref.ref[Caller] | None = None

    def lend(self, user: Caller) -> None:
        """A call uses it until its backward is over."""
        self._user = weakref.ref(user)

    @property
    def is_free(self) -> bool:
        """True when neither a script nor a call needs what is in it."""
        user = None if self._user is None else self._user()
        return (user is None or not user.is_open) and not self.gradients.is_held


class Recordings:
    """Those of one deployment on one rank.

    Attributes:
        replay_bytes: the most that a replay has, at its peak, beyond what is held between calls.
    """

    def __init__(self) -> None:
        self.replay_bytes = 0
        self._known: dict[tuple[int, int], Known] = {}
        self._rooms: list[_Room] = []
        self._open: weakref.ref[Caller] | None = None
        self._pool: Any = None
        self._bytes = 0
        self._told: set[str] = set()
        self._has_watched = False

    def end_backward(self) -> None:
        """A backward of a call is over, of which the script may have let go by now.

        The optimizer may make its state next. In pieces of what a watched run has had, it would keep the rest of them
        from recordings, which have memory of their own.
        """
        if self._has_watched:
            self._has_watched = False
            torch.cuda.empty_cache()

    def _note_watched(self) -> None:
        self._has_watched = True

    def run(
        self,
        caller: Caller,
        variant: Variant,
        task: Task,
        inputs: OfBatch,
        inside: Mapping[int, Tensor],
        marks: StepMarks | None,
    ) -> AnyRun | None:
        """The run of a call, done as far as the call goes; ``None`` where it is to be carried out as any."""
        known = self._of(task) if task.program.call != "forward" and task.reduce else None
        if known is None or not self._may_record(known, variant):
            self._make_room()
            return None
        if not known.watched or known.is_under_watch:
            is_whole = task.program.call == "whole"
            known.watcher = None if is_whole else weakref.ref(caller)
            room = self.lend_room(caller, task.context) if is_whole else None
            return WatchedRun(known, task, inputs, inside, marks, room, self._note_watched)
        place = self._free_room(task.context)
        recording = None if place is None else self._recording(known, task, inputs, inside, place)
        outputs = None if recording is None else self._room_for_outputs(known, recording)
        if place is None or recording is None or outputs is None:
            self._make_room()
            return None
        self._rooms[place].lend(caller)
        if task.program.call == "halves":
            self._open = weakref.ref(caller)
        return Replay(recording, inputs, inside, outputs, marks)

    def _of(self, task: Task) -> Known | None:
        key = id(task.context), id(task.program)
        known, codes = self._known.get(key), compiled_for(task)
        if known is not None and known.codes != codes and not self._awaits_backward:
            self._drop(self._known.pop(key))
            known = None
        if known is None and len(self._known) < _MOST_PROGRAMS:
            known = self._known[key] = Known(task.program, task.context, codes)
        return known

    def _may_record(self, known: Known, variant: Variant) -> bool:
        if known.is_new:
            known.is_new = False
            known.why_not = why_not(known.context, variant, known.program)
        if known.why_not and known.why_not not in self._told:
            self._told.add(known.why_not)
            if process.get_rank() == 0:
                _log.info("steps are not recorded as CUDA graphs: %s", known.why_not)
        return not known.why_not and not torch.is_anomaly_enabled()

    # Where to

    @property
    def _awaits_backward(self) -> bool:
        """True while a backward of a replayed call may come: what it needs lies where other replays write."""
        user = None if self._open is None else self._open()
        return user is not None and user.is_open

    def lend_room(self, caller: Caller, context: StageContext) -> GradientSet | None:
        """Where a run that is no replay may put its gradients, so that none have memory besides; ``None``: anywhere."""
        place = self._free_room(context)
        if place is None:
            return None
        self._rooms[place].lend(caller)
        return self._rooms[place].gradients

    def _free_room(self, context: StageContext) -> int | None:
        """The place of a room that may be written to."""
        if self._awaits_backward:
            return None
        gradients = context.gradients
        for place, room in enumerate(self._rooms):
            if room.is_free and not gradients.delivery.is_about_to_give(room.gradients):
                return place
        if len(self._rooms) == _MOST_ROOMS:
            return None
        if self._rooms:
            gradients.note_second(self._rooms[0].gradients)
        self._rooms.append(_Room(gradients.new_set()))
        return len(self._rooms) - 1

    def _recording(
        self, known: Known, task: Task, inputs: OfBatch, inside: Mapping[int, Tensor], room: int
    ) -> Recording | None:
        recording = known.recordings.get(room)
        if recording is not None and recording.is_stale:
            self._drop(known)
            recording = None
        if recording is not None:
            return recording if recording.serves(inputs, inside) else None
        if known.recorded == _MOST_TIMES * _MOST_ROOMS:
            known.why_not = "parameters or buffers are in other memory at nearly each step"
            return None
        known.recorded += 1
        stream = torch.cuda.current_stream(task.context.device)
        try:
            self._record(known, task, inputs, inside, room)
        except Exception as error:  # whatever torch or a kernel has against it
            # Where a recording cannot begin, torch stays on its stream.
            torch.cuda.set_stream(stream)
            task.context.forget_messages()
            self._retire_pool()
            known.note_failure(f"recording failed: {first_line(error)}")
            return None
        return known.recordings[room]

    def _record(self, known: Known, task: Task, inputs: OfBatch, inside: Mapping[int, Tensor], room: int) -> None:
        if self._pool is None:
            # Messages between a graph and what is none must be the same kernels on both sides.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            self._pool = torch.cuda.graph_pool_handle()
            _RECORDED.add(self)
            before_groups_end(_end_all)
        device = task.context.device
        torch.cuda.empty_cache()
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        gradients = self._rooms[room].gradients
        # What finds no room piece by piece may in one block: between pieces lies what none fits into.
        block_bytes = known.seen.growth_bytes if known.failures and not self._bytes else 0
        known.recordings[room] = Recording(task, inputs, inside, gradients, known.seen, self._pool, block_bytes)
        self._bytes += max(0, torch.cuda.memory_reserved(device) - reserved)
        # The peak may be older than the recording.
        most = min(torch.cuda.max_memory_allocated(device) - allocated, self._bytes)
        stays = torch.cuda.memory_allocated(device) - allocated
        self.replay_bytes = max(self.replay_bytes, most - stays + known.recordings[room].output_bytes)

    def _room_for_outputs(self, known: Known, recording: Recording) -> OfBatch | None:
        """Where a replay's outputs go: what the graphs have keeps from others even what is free in it."""
        try:
            return recording.room_for_outputs()
        except torch.OutOfMemoryError:
            known.note_failure("there is no memory for its outputs beside the graphs")
            self._drop(known)
            torch.cuda.empty_cache()
            return None

    # An end

    def _make_room(self) -> None:
        """Before a run that is no replay: recordings give way where there is no memory for both."""
        if not self._bytes or self._awaits_backward:
            return
        left = left_bytes(torch.device("cuda", torch.cuda.current_device()))
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - self._bytes
        if left + max(0, unused) < self._bytes:
            self.drop()

    def _drop(self, known: Known) -> None:
        if known.recordings:
            # Replays may still run, on any stream, in memory that others take next.
            torch.cuda.synchronize()
        for recording in known.recordings.values():
            recording.reset()
        known.recordings.clear()
        self._retire_pool()

    def _retire_pool(self) -> None:
        """Other recordings get a pool of their own where none has this one: torch refuses a pool whose graphs are all
        gone while there is memory in it, and cuBLAS keeps some for as long as the process lives."""
        if not any(known.recordings for known in self._known.values()):
            self._pool, self._bytes, self.replay_bytes = None, 0, 0

    def drop(self) -> None:
        """Gives back all graphs and their memory. Runs that are met again are recorded again."""
        for known in self._known.values():
            self._drop(known)
        self._rooms.clear()
        torch.cuda.empty_cache()

    def forget_all(self) -> None:
        """Lets go of what is known of all runs."""
        self.drop()
        self._known.clear()

    def forget(self, context: StageContext) -> None:
        """Lets go of what is known of a Stage's runs."""
        for key in [key for key, known in self._known.items() if known.context is context]:
            self._drop(self._known.pop(key))

    def __str__(self) -> str:
        """What has become of the programs that this rank has met, in words."""
        done = sum(bool(known.recordings) for known in self._known.values())
        refusals = dict.fromkeys(known.why_not for known in self._known.values() if known.why_not)
        text = f"{done} of {len(self._known)} kinds of steps are replayed as CUDA graphs"
        return "; ".join([text, *(f"not all because {why}" for why in refusals)])


_RECORDED: weakref.WeakSet[Recordings] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Communicators cannot end before the graphs that use them."""
    for recordings in list(_RECORDED):
        recordings.drop()
