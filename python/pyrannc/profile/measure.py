"""What one Block costs, measured on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from pyrannc.blocks.split_backward import SplitBackward
from pyrannc.capture.nodes.bounds import within_bounds
from pyrannc.core.profile import BlockPoint
from pyrannc.errors import first_line
from pyrannc.log import get_logger
from pyrannc.profile.block import BlockCode, Run
from pyrannc.profile.meter import LEAST_US, Meter

_log = get_logger("DPStaging")

_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
_OVERHEAD_TRIALS = 5
_HOST_SERIES = 3
_HOST_CALLS = 3
"""Of a series; their backwards are one, as are those of a Stage's Blocks."""
_MOST_AGAINST_PLAIN = 1.03
"""Compiled code may take so many times what its operators do: measurements differ, and it needs less memory."""
_MOST_KEPT = 0.9
"""Where memory is short, of what operators keep, compiled code that keeps less keeps less than so much."""
_MOST_LEANER = 1.5
"""It may take so many times what they do: a forward computed again is a third of both passes."""
_DEVICE_TIMES = ("forward_us", "backward_us", "backward_input_us", "backward_weight_us")


class BlockMeter:
    """Measures Blocks on ``device``.

    What a call costs the host whatever is in it does not count: that is the Cluster's ``action_us``, once for a Stage.

    Args:
        replayed: steps are replayed as CUDA graphs.

    Attributes:
        slowdown: how many times longer the leading Block takes in a training than when it is measured; none before.
        message_slowdown: by what share it takes longer beside a message; none before, and where that is not known.
        eager_spans: hashes of Spans whose code takes longer than their operators, and keeps no less where it should.
    """

    def __init__(self, device: torch.device, *, replayed: bool = False) -> None:
        self.slowdown: float | None = None
        self.message_slowdown: float | None = None
        self.eager_spans: set[str] = set()
        self._meter = Meter(device, replayed=replayed)
        self._forward_overhead_us = self._least_us(_empty_forward(device))
        self._backward_overhead_us = self._least_us(_empty_backward(device))

    def _least_us(self, call: Callable[[], object]) -> float:
        """Time of a call when nothing disturbs it."""
        return min(self._meter.host_us([call]) for _ in range(_OVERHEAD_TRIALS))

    def points(
        self,
        name: str,
        make: Callable[[], BlockCode],
        row_counts: Sequence[int],
        *,
        compiles: bool = True,
        leads: bool = False,
    ) -> list[BlockPoint] | None:
        """The costs at each of ``row_counts``, which increase, up to the first that does not fit.

        Args:
            name: what the log calls the Block.
            make: makes the Block.
            compiles: it is compiled where Spans are.
            leads: no other takes more of a step.

        Returns:
            None when the Block cannot be run on made-up data.
        """
        with self._meter.where_replays_are_made():
            return self._points(name, make, row_counts, compiles=compiles, leads=leads)

    def _points(
        self, name: str, make: Callable[[], BlockCode], row_counts: Sequence[int], *, compiles: bool, leads: bool
    ) -> list[BlockPoint] | None:
        points: list[BlockPoint] = []
        code: BlockCode | None = None
        try:
            code = make()
            self._meter.draw_from(code.randomness)
            host_us: tuple[float, float] | None = None
            for rows in row_counts:
                self._try(code, rows)
                host_us = host_us or self._host_us(code, rows)
                points.append(self._point(code, rows, host_us))
        except Exception as error:
            if not is_out_of_memory(error):
                _log.warning("%s is estimated, because it cannot be measured: %s", name, first_line(error))
                return None
            points.append(BlockPoint(row_counts[len(points)], fits=False))
        fitting = [point for point in points if point.fits]
        compiled = self._compiled_point(name, code, fitting[-1]) if code and compiles and fitting else None
        if code and compiled is None:
            code.leave_as_it_is()
        if leads and code and fitting:
            self._measure_in_training(code, fitting[-1].rows)
        if compiled is None:
            return points
        return [self._as_compiled(point, fitting[-1], compiled) if point.fits else point for point in points]

    def _try(self, code: BlockCode, rows: int) -> None:
        """Raises IndexError or ValueError for made-up data that a GPU ends at; the host raises them by itself."""
        if self._meter.on_gpu:
            with within_bounds():
                code.forward(rows, code.feeds(rows))

    def _compiled_point(self, name: str, code: BlockCode, plain: BlockPoint) -> BlockPoint | None:
        """The cost of compiled code, where there is some that runs and pays."""
        rows = plain.rows
        try:
            if code.compile(rows, code.feeds(rows)):
                # Its parts are taken to gain what the whole backward does.
                compiled = self._point(code, rows, self._host_us(code, rows), parted=False)
                is_leaner = code.keeps_less and compiled.saved_bytes < _MOST_KEPT * plain.saved_bytes
                most = _MOST_LEANER if is_leaner else _MOST_AGAINST_PLAIN
                if self._taken_us(compiled) <= most * self._taken_us(plain):
                    return compiled
                self.eager_spans.add(code.span_hash)
        except Exception as error:  # whatever a compiler or its code raises: the operators are measured
            _log.debug("%s is measured as it is: %s", name, first_line(error))
        return None

    def _taken_us(self, point: BlockPoint) -> float:
        """By the device, or by a host that is slower to start it each time."""
        device_us, host_us = point.forward_us + point.backward_us, point.forward_host_us + point.backward_host_us
        return device_us if self._meter.replays else max(device_us, host_us)

    def _as_compiled(self, plain: BlockPoint, last: BlockPoint, compiled: BlockPoint) -> BlockPoint:
        """What compiled code costs at other rows, by what it gains at the last: each takes a compilation."""

        def scaled(name: str, by: str) -> float:
            before, after = getattr(last, by), getattr(compiled, by)
            return float(getattr(plain, name) * after / before) if before else float(getattr(plain, name))

        times = ("forward_us", "backward_us", "forward_host_us", "backward_host_us")
        found = {name: scaled(name, name) for name in times}
        # Only a Stage whose backwards come in two parts compiles them so.
        found |= {name: scaled(name, "backward_us") for name in ("backward_input_us", "backward_weight_us")}
        if not self._meter.on_gpu:
            # What kernels allocate on the host is not seen.
            return replace(plain, **found)  # type: ignore[arg-type]  # all are floats
        sizes = {name: int(scaled(name, name)) for name in ("saved_bytes", "workspace_bytes")}
        return replace(plain, **found, **sizes)  # type: ignore[arg-type]  # likewise

    @contextmanager
    def in_steps(
        self, make: Callable[[], BlockCode], rows: int, *, eager: bool
    ) -> Iterator[Callable[[], object] | None]:
        """A Block's forward and backward as steps run them, to be called inside.

        Args:
            make: makes the Block.
            eager: it is not compiled.

        Returns:
            None where it cannot run, or waits for its host.
        """
        with self._meter.where_replays_are_made():
            yield self._in_steps(make, rows, eager)

    def _in_steps(self, make: Callable[[], BlockCode], rows: int, eager: bool) -> Callable[[], object] | None:
        try:
            code = make()
            self._meter.draw_from(code.randomness)
            self._try(code, rows)
            if eager or not self._compiles(code, rows):
                code.leave_as_it_is()
            return self._meter.without_host(_step(code, rows))
        except Exception as error:  # whatever the code raises, such as that there is no room for it
            _log.debug("sums are not measured beside the leading Span: %s", first_line(error))
            return None

    def _compiles(self, code: BlockCode, rows: int) -> bool:
        try:
            return code.compile(rows, code.feeds(rows))
        except Exception as error:  # whatever a compiler raises: the operators run
            _log.debug("the leading Span is measured as it is: %s", first_line(error))
            return False

    def _measure_in_training(self, code: BlockCode, rows: int) -> None:
        """What else there is beside a Block in a training."""
        self.slowdown = 1.0
        try:
            step = _step(code, rows)
            self.slowdown = self._meter.slowdown(step)
            self.message_slowdown = self._meter.message_slowdown(step)
        except torch.OutOfMemoryError:
            pass

    def release(self) -> None:
        """Gives the memory of Blocks that are done back to the device."""
        self._meter.release()

    def _host_us(self, code: BlockCode, rows: int) -> tuple[float, float]:
        """Times of the host for the forward and the backward; they hardly depend on the rows."""
        if not self._meter.on_gpu:
            return 0.0, 0.0
        feeds = code.feeds(rows)
        # Of a host that does not matter one call tells enough.
        is_idle = self._meter.leaves_host_idle(lambda: code.forward(rows, feeds))
        series, calls = (1, 1) if is_idle else (_HOST_SERIES, _HOST_CALLS)

        def forwards() -> None:
            for _ in range(calls):
                code.forward(rows, feeds)

        def backwards() -> Iterator[Callable[[], None]]:
            for _ in range(series):
                first, *runs = [_prepared(code, rows) for _ in range(1 + calls)]
                roots = [root for run in runs for root in run.roots]
                seeds = [seed for run in runs for seed in run.seeds]
                # A thread that has slept is slower at first.
                torch.autograd.backward(first.roots, first.seeds)
                yield partial(torch.autograd.backward, roots, seeds)

        forward_us = self._meter.host_us([forwards] * series) / calls - self._forward_overhead_us
        backward_us = 0.0
        if _prepared(code, rows).roots:
            backward_us = (self._meter.host_us(backwards()) - self._backward_overhead_us) / calls
        return max(0.0, forward_us), max(0.0, backward_us)

    def _point(self, code: BlockCode, rows: int, host_us: tuple[float, float], *, parted: bool = True) -> BlockPoint:
        feeds = code.feeds(rows)

        def forward() -> dict[int, Tensor]:
            return code.forward(rows, feeds)

        forward_us = self._compute_us(forward, self._forward_overhead_us)
        saved_bytes, workspace_bytes = self._memory(code, forward, feeds)
        run = code.prepare_backward(feeds, forward())
        backward_us, input_us, weight_us = self._backward_us(run, parted=parted and not code.keeps_whole)
        return BlockPoint(
            rows=rows,
            forward_us=forward_us,
            backward_us=backward_us,
            forward_host_us=host_us[0],
            backward_host_us=host_us[1],
            backward_input_us=input_us,
            backward_weight_us=weight_us,
            saved_bytes=saved_bytes,
            workspace_bytes=workspace_bytes,
        )

    def _compute_us(self, call: Callable[[], object], overhead_us: float) -> float:
        """Time that the device computes for a call; a host that computes itself has an overhead besides."""
        us = self._meter.time_us(call)
        return us if self._meter.on_gpu else max(LEAST_US, us - overhead_us)

    def _memory(
        self, code: BlockCode, forward: Callable[[], dict[int, Tensor]], feeds: dict[int, Tensor]
    ) -> tuple[int, int]:
        with self._meter.watch_memory() as memory:
            results = forward()
            saved_bytes = memory.held_bytes()
            forward_bytes = memory.take_peak_bytes() - saved_bytes
            run = code.prepare_backward(feeds, results)
            before_bytes = memory.held_bytes()
            if run.roots:
                torch.autograd.backward(run.roots, run.seeds)
            backward_bytes = memory.take_peak_bytes() - before_bytes
        _drop_gradients(run.fresh)
        return saved_bytes, max(forward_bytes, backward_bytes)

    def _backward_us(self, run: Run, *, parted: bool) -> tuple[float, float, float]:
        """Times of the whole backward, and of its two parts where it comes in two."""
        roots = [get_gradient_edge(root) for root in run.roots]

        def parts(*, both: bool) -> None:
            backward = SplitBackward(roots, run.seeds, run.inputs)
            backward.run_inputs()
            if both:
                backward.run_weights(keep_graph=True)
            _drop_gradients(run.fresh)

        if not run.roots:
            return 0.0, 0.0, 0.0
        backward_us = self._compute_us(partial(_run_backward, run), self._backward_overhead_us)
        if not run.inputs or not run.weights or not parted:
            # All of it is one of the parts.
            return (backward_us, backward_us, 0.0) if run.inputs else (backward_us, 0.0, backward_us)
        input_us = self._compute_us(lambda: parts(both=False), self._backward_overhead_us)
        both_us = self._compute_us(lambda: parts(both=True), self._backward_overhead_us)
        return backward_us, input_us, max(0.0, both_us - input_us)


def _prepared(code: BlockCode, rows: int) -> Run:
    feeds = code.feeds(rows)
    return code.prepare_backward(feeds, code.forward(rows, feeds))


def slowed_down(point: BlockPoint, factor: float) -> BlockPoint:
    """The costs where a device takes so many times longer."""
    if not point.fits:
        return point
    return replace(point, **{name: getattr(point, name) * factor for name in _DEVICE_TIMES})


def _run_backward(run: Run) -> None:
    torch.autograd.backward(run.roots, run.seeds, retain_graph=True)
    _drop_gradients(run.fresh)


def is_out_of_memory(error: BaseException) -> bool:
    """True when a device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _drop_gradients(leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _empty_forward(device: torch.device) -> Callable[[], object]:
    """A call of generated code without Ops."""
    graph = fx.Graph()
    graph.placeholder("rows")
    graph.output((graph.placeholder("v"),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    tensor = torch.zeros(1, device=device)
    return lambda: module(1, tensor)


def _empty_backward(device: torch.device) -> Callable[[], object]:
    """A backward through a view, which costs nothing but the call."""
    leaf, seed = torch.zeros(1, device=device, requires_grad=True), torch.ones(1, device=device)
    # The first call of a model may be an evaluation.
    with torch.enable_grad():
        root = leaf.view(1)

    def backward() -> None:
        torch.autograd.backward([root], [seed], retain_graph=True)
        leaf.grad = None

    return backward


def _step(code: BlockCode, rows: int) -> Callable[[], None]:
    """A Block's forward, and the backward of one before."""
    feeds = code.feeds(rows)
    run = code.prepare_backward(feeds, code.forward(rows, feeds))

    def step() -> None:
        code.forward(rows, feeds)
        if run.roots:
            _run_backward(run)

    return step
