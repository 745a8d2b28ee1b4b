"""Operators that fake tensors cannot run, or run wrongly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.fakes import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from pyrannc.capture.torch_internals.patching import PROXY_CALL
from pyrannc.capture.torch_internals.symbols import expression
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.torch_internals.tracing import disable_proxy_modes_tracing, proxy_of, track
from pyrannc.capture.user.source import Place, SourceTracker
from pyrannc.errors import RaNNCError

from .autocast import CastsAsOps, region_of_one_op
from .dims import AffineReader
from .even_parts import by_sizes
from .oracle import Oracle, real_execution
from .untraceable import UntraceableError

_aten = torch.ops.aten
_RECURRENT = (
    torch.ops.aten.lstm.input,
    torch.ops.aten.gru.input,
    torch.ops.aten.rnn_tanh.input,
    torch.ops.aten.rnn_relu.input,
)
_GIVE_LISTS = {
    op
    for name in ("unbind", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split")
    for packet in [getattr(torch.ops.aten, name)]
    for op in [getattr(packet, overload) for overload in packet.overloads()]
}
_WITHOUT_GENERATOR = {
    _aten.rand.generator: _aten.rand.default,
    _aten.randn.generator: _aten.randn.default,
    _aten.randint.generator: _aten.randint.default,
    _aten.randint.low_generator: _aten.randint.low,
    _aten.randperm.generator: _aten.randperm.default,
}
"""What draws from torch's own generator where it is given none; the first of each takes no size but a plain number."""
_REPEAT = torch.ops.aten.repeat_interleave.self_int
"""Each element as often as a number says: its ``output_size`` follows from that, and torch makes it a plain number."""
_CHOOSE = torch.ops.aten.index.Tensor
_FILL_DIAGONAL = torch.ops.aten.fill_diagonal_.default
_MATRIX = 2
_READ_NUMBER = torch.ops.aten.item.default
_OF_KNOWN_SHAPE = (torch.ops.aten.ctc_loss.Tensor, torch.ops.aten.ctc_loss.IntList)
"""Torch says that their shapes depend on data, which is so for a result of their insides only."""


def insert_node(tracer: Any, target: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> Any:
    """Adds a node that gives ``result``, and returns the result."""
    proxy = tracer.create_proxy("call_function", target, args, kwargs, name=getattr(target, "__name__", None))
    track(result, proxy, tracer)
    return result


def argument_of(item: Any, tracer: Any) -> Any:
    """What a node is given for a tensor or number: what stands for it in the trace, if anything does."""
    proxy = proxy_of(item, tracer)
    return item if proxy is None else proxy


@dataclass(frozen=True)
class TwoSizes:
    """Results of a call for the sample, and for some rows more if it could be given such: one, if it takes that."""

    first: Any
    second: Any
    more: int = 1


class BatchSizes:
    """Recognises the batch dimension of a real result."""

    def __init__(self, rows: int, symbol_size: torch.SymInt | None) -> None:
        self.rows = rows
        self.symbol_size = symbol_size
        self.reader = AffineReader(None if symbol_size is None else expression(symbol_size))

    def at_two_sizes(
        self,
        run: Callable[[Sequence[Any]], Any],
        reals: Sequence[Any],
        fakes: Sequence[Any],
        again: Callable[[int], Sequence[Any]] | None = None,
    ) -> TwoSizes:
        """What ``run`` gives for the samples, and for some rows more if they can be given such.

        Args:
            again: makes the samples anew for so many rows more, where some cannot be given any by themselves.

        Raises:
            UnstableError: other rows, or more of them, give results of other shapes than these two tell.
        """
        first = run(reals)
        try:
            return self._with_more(run, first, 1, reals, fakes, again)
        except (RaNNCError, UnstableError):
            raise
        except Exception as error:
            # It may take even numbers of rows only, or the like: what divides the sample's divides twice as many, too.
            try:
                return self._with_more(run, first, self.rows, reals, fakes, again)
            except UnstableError:
                raise
            except Exception:
                raise error from error.__cause__

    def _with_more(
        self,
        run: Callable[[Sequence[Any]], Any],
        first: Any,
        step: int,
        reals: Sequence[Any],
        fakes: Sequence[Any],
        again: Callable[[int], Sequence[Any]] | None,
    ) -> TwoSizes:
        try:
            longer, longest = (self._all_longer(reals, fakes, more, again) for more in (step, 3 * step))
        except LookupError:
            return TwoSizes(first, None)
        if self.symbol_size is None or all(new is old for new, old in zip(longer, reals, strict=True)):
            return TwoSizes(first, first)
        made = TwoSizes(first, run(longer), step)
        flipped = [self._flipped(real, fake) for real, fake in zip(reals, fakes, strict=True)]
        for steps, inputs in ((0, flipped), (3, longest)):
            _refuse_unstable(made, run(inputs), steps)
        return made

    def _all_longer(
        self,
        reals: Sequence[Any],
        fakes: Sequence[Any],
        more: int,
        again: Callable[[int], Sequence[Any]] | None,
    ) -> Sequence[Any]:
        """Samples with so many rows more.

        Raises:
            LookupError: there are none.
        """
        try:
            return [self._longer(real, fake, more) for real, fake in zip(reals, fakes, strict=True)]
        except ValueError as error:
            sizes = [self.reader.read(size) for fake in fakes if isinstance(fake, Tensor) for size in fake.shape]
            if again is None or None in sizes:
                raise LookupError("an extent is not known") from error
            return again(more)

    def are_apart(
        self,
        run: Callable[[Sequence[Any]], Sequence[Tensor]],
        reals: Sequence[Any],
        fakes: Sequence[Any],
        made: TwoSizes,
        distinct: int,
    ) -> bool:
        """True when parts of the sample give parts of what all its rows have given, in two divisions.

        Args:
            distinct: the sample's first rows that are not others again.
        """
        if made.second is None or distinct < 2 or any(not whole.dim() for whole in made.first):
            return False

        def part(lo: int, hi: int) -> Sequence[Tensor]:
            return run([self._narrowed(real, fake, lo, hi) for real, fake in zip(reals, fakes, strict=True)])

        try:
            pairs = [(part(0, cut), part(cut, self.rows)) for cut in {1, distinct - 1}]
        except Exception:  # whatever the user's code says to fewer rows
            return False
        return all(
            first.shape[1:] == second.shape[1:] and torch.equal(torch.cat((first, second)), whole)
            for parts in pairs
            for whole, first, second in zip(made.first, *parts, strict=True)
        )

    def _narrowed(self, real: Any, fake: Any, lo: int, hi: int) -> Any:
        for dim, per_row in self._batch_dims(fake):
            real = real.narrow(dim, lo * per_row, (hi - lo) * per_row)
        return real

    def _longer(self, real: Any, fake: Any, more: int) -> Any:
        """A sample with some rows more, the first ones again.

        Raises:
            ValueError: what more rows would make of it is not known.
        """
        dims = self._batch_dims(fake)
        if len(dims) > 1:
            raise ValueError("it is of pairs of rows, as a mask over a packed batch is")
        for dim, per_row in dims:
            index = torch.arange(more * per_row, device=real.device) % real.shape[dim]
            real = torch.cat([real, real.index_select(dim, index)], dim)
        return real

    def _flipped(self, real: Any, fake: Any) -> Any:
        """A sample whose last row comes first; what a row has of elements stays in order."""
        try:
            dims = self._batch_dims(fake)
        except ValueError:
            # It tells where rows begin.
            return real
        for dim, per_row in dims:
            index = torch.arange(real.shape[dim], device=real.device).view(-1, per_row).flip(0).flatten()
            real = real.index_select(dim, index)
        return real

    def row_dim(self, fake: Any) -> int:
        """The dimension whose extent alone is so many times the rows; 0 if there is none."""
        try:
            found = self._batch_dims(fake)
        except ValueError:
            return 0
        return found[0][0] if len(found) == 1 else 0

    def rows_first(self, fake: Tensor, dim: int, mode: FakeTensorMode) -> Tensor:
        """An empty tensor like another one, whose dimension ``dim`` comes first, as it lies in memory."""
        with disable_proxy_modes_tracing(), mode:
            moved = fake.detach().movedim(dim, 0)
            made = torch.empty_strided(moved.shape, moved.stride(), dtype=fake.dtype, device=fake.device)
            return _no_leaf(made, fake.requires_grad)

    def _batch_dims(self, fake: Any) -> list[tuple[int, int]]:
        """The dimensions that grow with the batch, and by how much."""
        if not isinstance(fake, Tensor):
            return []
        found = [(dim, self.reader.read(size)) for dim, size in enumerate(fake.shape)]
        if any(extent is None or (extent.per_row and extent.fixed) for _, extent in found):
            raise ValueError("an extent is not known, or no multiple of the rows")
        return [(dim, extent.per_row) for dim, extent in found if extent is not None and extent.per_row]

    def fakes(
        self, made: TwoSizes, device: torch.device, requires_grad: bool | Sequence[bool], mode: FakeTensorMode
    ) -> tuple[Any, ...]:
        """Empty tensors like the results, each of whose extents is told from two batch sizes, or else from one."""
        first = [made.first] if isinstance(made.first, Tensor) else list(made.first)
        second = first if made.second is None else [made.second] if isinstance(made.first, Tensor) else made.second
        wants = [requires_grad] * len(first) if isinstance(requires_grad, bool) else requires_grad
        with disable_proxy_modes_tracing(), mode:
            if made.second is None:
                return tuple(self.fake_like(real, device, grad) for real, grad in zip(first, wants, strict=True))
            return tuple(
                self._between(one, other, made.more, device=device, requires_grad=grad)
                for one, other, grad in zip(first, second, wants, strict=True)
            )

    def _between(
        self, first: Tensor, second: Tensor, more: int, *, device: torch.device, requires_grad: bool
    ) -> Tensor:
        shape: list[Any] = []
        for size, other in zip(first.shape, second.shape, strict=True):
            per_row = (other - size) // more
            if self.symbol_size is None or not per_row:
                shape.append(size)
            else:
                shape.append(self.symbol_size * per_row + (size - per_row * self.rows))
        return _no_leaf(torch.empty(shape, dtype=first.dtype, device=device), requires_grad)

    def fake_like(self, real: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
        """An empty tensor of the same type and shape, with the batch symbol where the extent is a multiple of it."""
        shape = [self._symbolic(size) for size in real.shape]
        return _no_leaf(torch.empty(shape, dtype=real.dtype, device=device), requires_grad)

    def _symbolic(self, size: int) -> int | torch.SymInt:
        if self.symbol_size is None or size == 0 or size % self.rows:
            return size
        return self.symbol_size * (size // self.rows)


def _no_leaf(fake: Tensor, requires_grad: bool) -> Tensor:
    """With gradients, if any, as what is computed has them: the model may change it in place."""
    if not requires_grad or not (fake.is_floating_point() or fake.is_complex()):
        return fake
    with torch.enable_grad():
        return fake.requires_grad_().clone()


class UnstableError(ValueError):
    """Shapes of results depend on data."""


def _refuse_unstable(made: TwoSizes, again: Any, steps: int) -> None:
    """``again``: what as many rows more as ``steps`` times those of the second size have given."""
    first, second, third = (_shapes(result) for result in (made.first, made.second, again))
    if not len(first) == len(second) == len(third):
        raise UnstableError("the number of its results depends on data")
    for one, two, other in zip(first, second, third, strict=True):
        if not len(one) == len(two) == len(other):
            raise UnstableError("the number of dimensions of a result depends on data")
        sizes = zip(one, two, other, strict=True)
        if any(size + steps * (next_size - size) != found for size, next_size, found in sizes):
            raise UnstableError(f"a result's shape depends on data: {one}, for other rows {other}")
        if any((next_size - size) % made.more for size, next_size in zip(one, two, strict=True)):
            raise UnstableError(f"a result has no whole number of elements for each row: {one}, for more rows {two}")


def _shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(item.shape) for item in ([result] if isinstance(result, Tensor) else result)]


class OperatorFallbacks:
    """Takes over the operators that a trace on fake tensors would get wrong."""

    def __init__(
        self,
        oracle: Oracle,
        mode: FakeTensorMode,
        sizes: BatchSizes,
        tracker: SourceTracker,
        full_masks: Collection[Place] = (),
    ) -> None:
        self._oracle = oracle
        self._mode = mode
        self._sizes = sizes
        self._tracker = tracker
        self._full_masks = full_masks

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Operators are taken over while active."""
        original, casts = PROXY_CALL.original, CastsAsOps()

        def proxy_call(proxy_mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
            if func in _WITHOUT_GENERATOR and kwargs.get("generator") is None:
                func, kwargs = _WITHOUT_GENERATOR[func], {n: item for n, item in kwargs.items() if n != "generator"}
            if func is _REPEAT:
                kwargs = {name: item for name, item in kwargs.items() if name != "output_size"}
            func, args, kwargs = by_sizes(func, args, kwargs, self._sizes.reader)
            if func in _RECURRENT:
                return self._recurrent(proxy_mode.tracer, func, args, kwargs)
            number = self._constant(proxy_mode.tracer, *args) if func is _READ_NUMBER else None
            if number is not None:
                return number
            if func is _CHOOSE and self._tracker.here() in self._full_masks:
                with proxy_mode:
                    if self._chooses_all(proxy_mode.tracer, *args):
                        return args[0].flatten(0, args[1][0].dim() - 1)
            if func is _FILL_DIAGONAL and args[0].dim() == _MATRIX and not any((*args[2:], *kwargs.values())):
                with proxy_mode:
                    # Its rule for fake tensors takes extents for numbers.
                    args[0].diagonal().fill_(args[1])
                return args[0]
            converted = casts.made_of(func, args, kwargs)
            if converted is not None:
                with proxy_mode:
                    return converted(*args, **kwargs)
            try:
                # How many tensors there are decides what is captured.
                with nullcontext() if func in _GIVE_LISTS else self._oracle.in_operator():
                    return original(proxy_mode, func, pre_dispatch, args, kwargs)
            except DynamicOutputShapeException as error:
                if func in _OF_KNOWN_SHAPE:
                    return self._sampled(error, proxy_mode.tracer, func, args, kwargs)
                here = self._tracker.here()
                cause = f"{func} gives a result whose shape depends on data"
                raise UntraceableError(f"{here}: {cause}", here, cause) from error
            except UnsupportedOperatorException as error:
                return self._sampled(error, proxy_mode.tracer, func, args, kwargs)

        with PROXY_CALL.replaced_by(proxy_call):
            yield

    def _constant(self, tracer: Any, tensor: Tensor) -> int | float | bool | None:
        """The number in a tensor that no argument, state or chance goes into; None for other tensors."""
        proxy = proxy_of(tensor, tracer)
        if proxy is None or tensor.dtype.is_complex:
            return None
        return self._oracle.constant_of(proxy.node)

    def _chooses_all(self, tracer: Any, tensor: Tensor, indices: Sequence[Tensor | None]) -> bool:
        """True for one mask that the inputs alone decide, and that has all elements of this batch."""
        mask = indices[0]
        proxy = proxy_of(mask, tracer)
        if len(indices) > 1 or mask is None or mask.dtype != torch.bool or proxy is None:
            return False
        return self._oracle.is_of_inputs(proxy.node) and bool(mask.all())

    def _recurrent(self, tracer: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Recurrent layers: torch's fake final states have one dimension too many."""
        with disable_proxy_modes_tracing():
            output, *states = func(*args, **kwargs)
            initial = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            states = [state.reshape(like.shape) for state, like in zip(states, initial, strict=True)]
        node_args, node_kwargs = self._proxied(tracer, args, kwargs)
        with region_of_one_op(tracer, output.device):
            return insert_node(tracer, func, node_args, node_kwargs, (output, *states))

    def _sampled(self, error: Exception, tracer: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Learns the shapes of the results from a run on the real samples."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        proxies = [proxy_of(item, tracer) for item in flat]
        if any(proxy is None and isinstance(item, Tensor) for proxy, item in zip(proxies, flat, strict=True)):
            raise error
        reals = [
            self._oracle.sample_of(proxy.node) if proxy is not None else item
            for proxy, item in zip(proxies, flat, strict=True)
        ]
        with real_execution():
            real_args, real_kwargs = pytree.tree_unflatten(reals, spec)
            result = func(*real_args, **real_kwargs)
        tensors = [item for item in flat if isinstance(item, Tensor)]
        wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        with disable_proxy_modes_tracing(), self._mode:
            fake = pytree.tree_map_only(
                Tensor, lambda real: self._sizes.fake_like(real, tensors[0].device, wants_grad), result
            )
        node_args, node_kwargs = self._proxied(tracer, args, kwargs)
        return insert_node(tracer, func, node_args, node_kwargs, fake)

    @staticmethod
    def _proxied(tracer: Any, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(partial(argument_of, tracer=tracer), (args, kwargs))
