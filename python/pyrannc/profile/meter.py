"""Time and memory of calls on a device.

A GPU runs what the host has queued, so many calls take as long as the slower of the two needs. Its own time is
measured while it finds all of them queued: it sleeps until then, and runs them without a gap. Where steps are replayed
as CUDA graphs, in which kernels stand otherwise apart, calls are too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import torch

from pyrannc.blocks.randomness import Randomness
from pyrannc.capture.torch_internals.devices import sleep_on_gpu
from pyrannc.capture.torch_internals.tensors import StorageWeakRef, TorchDispatchMode, pytree, storage_address
from pyrannc.errors import first_line
from pyrannc.log import get_logger
from pyrannc.profile.message import WaitingMessage
from pyrannc.profile.recorded import Recorded

_log = get_logger("DPStaging")

_SERIES_S = 0.005
"""How long one series of calls should take."""
_MOST_CALLS = 5
"""Of a series: a GPU's queue takes about a thousand kernels."""
_SERIES = 3
_ENOUGH_S = 0.1
"""One series is enough when it takes so long, and one call before it."""
_LONG_S = 0.01
"""A call that takes so long hides a host that starts it in half of that."""
_BUSY_S = 2.0
"""After so long a GPU has come to the clock rate that its power limit allows."""
_SUSTAINED_S = 0.3
"""How long it is then looked at."""
LEAST_US = 0.1
"""Nothing is free."""
_SLEEP_CYCLES_PER_S = 3e9
"""More than any GPU runs, so that none wakes up before all calls are queued."""
_TIMES_WAITED = 3
"""A message waits so many times longer than calls should take beside it."""


class MemoryWatch(Protocol):
    """Sees the memory that is allocated while it is entered."""

    def __enter__(self) -> MemoryWatch: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def held_bytes(self) -> int:
        """What is held now, beyond what was held when it was entered."""

    def take_peak_bytes(self) -> int:
        """The most that was held since it was entered, or since the last question."""


class Meter:
    """Measures calls on ``device``.

    Args:
        replayed: they are parts of steps that are replayed as CUDA graphs.

    Attributes:
        on_gpu: the device is a GPU.
        replays: what is measured now is replayed.
    """

    def __init__(self, device: torch.device, *, replayed: bool = False) -> None:
        self._device = device
        self._randomness: Randomness | None = None
        self.on_gpu = device.type == "cuda"
        self._replayed = replayed and self.on_gpu
        self.replays = self._replayed

    @contextmanager
    def where_replays_are_made(self) -> Iterator[None]:
        """What is called inside may be replayed, with what is made inside: graphs have a stream of their own."""
        self.replays, self._randomness = self._replayed, None
        if not self._replayed:
            yield
            return
        before = torch.cuda.current_stream(self._device)
        stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
        assert stream is not None, "torch has one for all recordings"
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            before.wait_stream(stream)

    def draw_from(self, randomness: Randomness) -> None:
        """What is measured from now on draws from there."""
        self._randomness = randomness

    def time_us(self, call: Callable[[], object]) -> float:
        """Time of a call among many of its kind: on a GPU without gaps in which it waits for the host."""
        queued_s, once_s = self._warm_up(call)
        calls = _calls(once_s)
        recorded = self._recorded(call, calls)
        if recorded is not None:
            return max(LEAST_US, self._time_us(recorded.replay, *self._warm_up(recorded.replay), 1) / calls)
        return self._time_us(call, queued_s, once_s, calls)

    def _time_us(self, call: Callable[[], object], queued_s: float, once_s: float, calls: int) -> float:
        """The median of series of so many calls."""
        series = 1 if calls * once_s > _ENOUGH_S else _SERIES
        if self.on_gpu:
            return _median(self._gpu_us(call, calls, queued_s) for _ in range(series))
        return _median(_host_us(call, calls) for _ in range(series))

    def _recorded(self, call: Callable[[], object], calls: int) -> Recorded | None:
        """So many calls as one graph, where they are replayed; ``None`` where they cannot be."""
        if not self.replays:
            return None
        try:
            return Recorded(call, calls, self._randomness or Randomness(self._device))
        except torch.OutOfMemoryError:
            return None
        except Exception as error:  # whatever torch or a kernel has against it, such as that it waits for the device
            _log.debug("it is not measured as replayed: %s", first_line(error))
            self.replays = False
            return None

    def _as_in_a_step(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call, or its replay."""
        recorded = self._recorded(call, 1)
        return call if recorded is None else recorded.replay

    def without_host(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """The call, or its replay; None where the device waits for its host."""
        warm = self._warmed(call)
        return None if warm is None else warm[0]

    def _warmed(self, call: Callable[[], object]) -> tuple[Callable[[], object], float, float] | None:
        """Likewise, with the seconds until it returns, and until the device has done it."""
        run = self._as_in_a_step(call)
        queued_s, once_s = self._warm_up(run)
        return (run, queued_s, once_s) if queued_s <= once_s / 2 else None

    def slowdown(self, call: Callable[[], object]) -> float:
        """How many times longer a call takes on a device that has been busy for long, as in training.

        A GPU at its power limit lowers its clock rate, which the short series of a measurement do not reach.
        """
        if not self.on_gpu:
            return 1.0
        warm = self._warmed(call)
        if warm is None:
            # It would wait for its host, and rest meanwhile.
            return 1.0
        run, queued_s, once_s = warm
        short_us = self._time_us(run, queued_s, once_s, _calls(once_s))
        until_s = time.perf_counter() + _BUSY_S
        while time.perf_counter() < until_s:
            self._queue(run, _MOST_CALLS, 0.0)
        sustained_us, _ = self._queue(run, max(1, int(_SUSTAINED_S / once_s)), 0.0)
        return max(1.0, sustained_us / short_us)

    def message_slowdown(self, call: Callable[[], object]) -> float | None:
        """By what share a call takes longer on a device on which a message waits for its other end.

        Returns:
            None where that cannot be known.
        """
        if not self.on_gpu:
            return None
        try:
            message = WaitingMessage()
        except Exception as error:  # whatever a compiler of kernels raises
            _log.debug("what messages cost computations is not known: %s", first_line(error))
            return None
        warm = self._warmed(call)
        if warm is None:
            return None
        run, queued_s, once_s = warm
        calls = _calls(once_s)
        waiting_cycles = int(_TIMES_WAITED * calls * (queued_s + once_s) * _SLEEP_CYCLES_PER_S)
        shares = []
        for _ in range(_SERIES):
            alone_us, _ = self._queue(run, calls, queued_s)
            message.begin(waiting_cycles)
            beside_us, _ = self._queue(run, calls, queued_s)
            if message.waits:
                shares.append(beside_us / alone_us - 1.0)
            message.end()
        return max(0.0, statistics.median(shares)) if shares else None

    def leaves_host_idle(self, call: Callable[[], object]) -> bool:
        """True where the device works for long when the host has started all of it."""
        queued_s, once_s = self._warm_up(call)
        return once_s > _LONG_S and queued_s <= once_s / 2

    def host_us(self, calls: Iterable[Callable[[], object]]) -> float:
        """Time of the host for one of some equal calls; what it starts on a GPU may take longer."""
        times_us = []
        for call in calls:
            times_us.append(_host_us(call, 1))
            self.synchronize()
        return _median(times_us)

    def _warm_up(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds until a call returns, and until the device has done it, when it has been called before."""
        call()
        self.synchronize()
        timed = self._timed(call)
        return timed if timed[1] > _ENOUGH_S else self._timed(call)

    def _timed(self, call: Callable[[], object]) -> tuple[float, float]:
        start = time.perf_counter()
        call()
        queued_s = time.perf_counter() - start
        self.synchronize()
        return queued_s, time.perf_counter() - start

    def _gpu_us(self, call: Callable[[], object], calls: int, queued_s: float) -> float:
        device_us, asleep = self._queue(call, calls, queued_s)
        if not asleep:
            # Some call waits for the GPU, or they fill its queue: it cannot be told apart from its host.
            device_us, _ = self._queue(call, calls, 0.0)
        return device_us

    def _queue(self, call: Callable[[], object], calls: int, queued_s: float) -> tuple[float, bool]:
        """Time of a call on the GPU, and whether it slept until all were queued."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # likewise
        sleep_on_gpu(int(calls * queued_s * _SLEEP_CYCLES_PER_S))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        asleep = not begin.query()  # type: ignore[no-untyped-call]  # likewise
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls, asleep

    def watch_memory(self) -> MemoryWatch:
        """Sees what the following calls allocate."""
        return _GpuMemory(self._device) if self.on_gpu else _HostMemory()

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Gives memory that nothing uses back to the device."""
        if self.on_gpu:
            torch.cuda.empty_cache()


def _host_us(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6 / calls


def _calls(once_s: float) -> int:
    """Of a series, where one takes so long."""
    return min(max(int(_SERIES_S / once_s), 1), _MOST_CALLS)


def _median(times_us: Iterable[float]) -> float:
    return max(LEAST_US, statistics.median(times_us))


class _GpuMemory:
    """What the caching allocator has given out, while no garbage of other code is collected."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self._collects = gc.isenabled()

    def __enter__(self) -> _GpuMemory:
        gc.disable()
        self._before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()

    def held_bytes(self) -> int:
        # Other threads may let go of something of theirs.
        return max(0, torch.cuda.memory_allocated(self._device) - self._before)

    def take_peak_bytes(self) -> int:
        peak = max(0, torch.cuda.max_memory_allocated(self._device) - self._before)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class _HostMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts the storages that operators make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # A storage's address is not given to another one while there is a weak reference to it.
        self._given: dict[int, StorageWeakRef] = {}
        self._peak_bytes = 0

    def held_bytes(self) -> int:
        self._made = {key: item for key, item in self._made.items() if not _is_gone(item[0])}
        return sum(size for _, size in self._made.values())

    def take_peak_bytes(self) -> int:
        peak, self._peak_bytes = self._peak_bytes, self.held_bytes()
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage_address(storage) not in self._made:
                self._given[storage_address(storage)] = _weak(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage_address(storage) not in self._given:
                self._made[storage_address(storage)] = (_weak(storage), storage.nbytes())
        self._peak_bytes = max(self._peak_bytes, self.held_bytes())
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch has no types for it


def _is_gone(weak: StorageWeakRef) -> bool:
    return bool(weak.expired())  # type: ignore[no-untyped-call]  # torch has no types for it
