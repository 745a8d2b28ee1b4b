"""Random numbers of Python and NumPy, which a captured graph would draw once for all calls: what draws stays whole.

And those of generators that a model holds, torch's too, which nobody sets alike on all ranks: these are refused. What
the library tries draws from no generator of the script's, torch's included.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import nn

from pyrannc.capture.torch_internals.devices import generator_address
from pyrannc.capture.torch_internals.patching import PatchPoint
from pyrannc.capture.torch_internals.tracing import current_tracer
from pyrannc.capture.user.bound import bound_to
from pyrannc.capture.user.kinds import is_of
from pyrannc.capture.user.source import Place, SourceTracker, belongs_to_user
from pyrannc.errors import CaptureError

from .untraceable import UntraceableError

_PYTHON = "Python's random module"
_NUMPY = "numpy.random"
_ADVICE = "use torch's own (torch.rand without generator=), or pass the number as a tensor argument"
_NO_DRAWS = {"seed", "getstate", "setstate", "get_state", "set_state"}
_WORD = (1 << 32) - 1
_MOST_ITEMS = 64
"""Of a container, among which a generator is looked for."""
_SEEDS = (35, 47468, 225219, 375, 140)
"""Of trials: both generators begin near 1/2, 0, 1, 1/4 and 3/4 of what they may give, so that a branch is taken by one
trial and left by another."""


def _numpy() -> Any:
    """Its random numbers, if somebody uses it."""
    return getattr(sys.modules.get("numpy"), "random", None)


def seed_others(seed: int) -> None:
    """Sets the generators of Python and NumPy."""
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.seed(seed & _WORD)


@contextmanager
def other_generators_restored() -> Iterator[None]:
    """Python's and NumPy's generators are afterwards as they were."""
    numpy = _numpy()
    before, before_numpy = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(before_numpy)


@contextmanager
def torch_draws(seed: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """Torch's generators of the host and of one GPU are afterwards as they were, and no other is touched.

    ``torch.manual_seed`` begins those of all devices anew, in which ranks and scripts differ.

    Args:
        seed: what they begin with inside; they go on if it is left out.
        device: whose; if left out, the process's current GPU, where it uses one.
    """
    gpus = [device] if device is not None and device.type == "cuda" else []
    if not gpus and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        gpus = [torch.device("cuda", torch.cuda.current_device())]
    with torch.random.fork_rng(devices=gpus):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            for gpu in gpus:
                with torch.cuda.device(gpu):
                    torch.cuda.manual_seed(seed)
        yield


@contextmanager
def trial_draws(trial: int) -> Iterator[Callable[[], bool]]:
    """Python and NumPy draw what they do in a trial of that number, on each rank. Gives what tells whether they did."""
    with other_generators_restored():
        seed_others(_SEEDS[trial % len(_SEEDS)])
        before = other_states()
        yield lambda: other_states() != before


@contextmanager
def alike_draws(trial: int, most: int) -> Iterator[None]:
    """Likewise, and each number is that of the first draw, so that rows which draw in turn get the same.

    Args:
        most: after so many draws others follow, for those who draw until a number suits them.
    """
    seed, drawn = _SEEDS[trial % len(_SEEDS)], itertools.count()
    with trial_draws(trial), ExitStack() as stack:
        for _, point in _draws():

            def draw(*args: Any, original: Any = point.original, **kwargs: Any) -> Any:
                seed_others(seed + next(drawn) // most)
                return original(*args, **kwargs)

            stack.enter_context(point.replaced_by(draw))
        yield


def _draws() -> Iterator[tuple[str, PatchPoint]]:
    """The functions that draw from the generators of Python and NumPy."""
    for title, module, generator in _modules():
        for name, item in list(vars(module).items()):
            if bound_to(item) is generator and name not in _NO_DRAWS:
                yield title, PatchPoint(module, name)


def _modules() -> Iterator[tuple[str, Any, Any]]:
    """Those that draw, each with the generator that its functions are methods of."""
    numpy = _numpy()
    yield _PYTHON, random, _owner(random, "random")
    if numpy is not None:
        yield _NUMPY, numpy, _owner(numpy, "random_sample")


@cache
def _owner(module: Any, name: str) -> Any:
    """What a function of a module is a method of, whatever stands in its place later."""
    return getattr(module, name).__self__


def other_states() -> list[tuple[str, bytes]]:
    """The generators of Python and NumPy by name, each with a state that compares by value."""
    return [(title, pickle.dumps(_state(generator))) for title, _, generator in _modules()]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits is not None else generator.get_state(legacy=False)


class TorchGenerators:
    """Generators of torch that are not its own, as runs of a part that stays whole draw from them.

    One that is made or seeded in each run is a constant. One that goes on from run to run is held by somebody, and
    would go on by trials and on ranks that run the part for more rows.
    """

    def __init__(self) -> None:
        # They live on here, so that no other one gets their address.
        self.drawn: dict[int, tuple[torch.Generator, bytes]] = {}

    def note(self, generator: torch.Generator) -> None:
        """Called before each draw: what the generator has come to at the first one."""
        address = generator_address(generator)
        shared = map(generator_address, (torch.default_generator, *torch.cuda.default_generators))
        if address not in self.drawn and address not in shared:
            state = generator.get_state()
            # No operator reads it, which modes would see.
            self.drawn[address] = generator, ctypes.string_at(state.data_ptr(), state.nbytes)

    def go_on(self, later: TorchGenerators) -> bool:
        """True where one has come to something else by a later run, whose generators are noted here, too."""
        return any(self.drawn.setdefault(key, found)[1] != found[1] for key, found in later.drawn.items())


class OtherGenerators:
    """The generators of ``random`` and ``numpy.random``, and those that a model's code holds.

    These are attributes of its sub-modules, and variables of the Python modules in which their classes stand: such a
    generator, a method of one, or what holds one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (f"the generator {name}", value)
            for name, found in itertools.chain(_attributes(model), _variables(model))
            for item in (found, *itertools.islice(_inside(found), _MOST_ITEMS))
            if is_generator(value := item if (owner := bound_to(item)) is None else owner)
        ]

    def _held_states(self) -> list[tuple[str, bytes]]:
        return [(name, pickle.dumps(_state(value))) for name, value in self._held]

    @contextmanager
    def untraced(self, tracker: SourceTracker) -> Iterator[None]:
        """What draws inside of a trace cannot be captured.

        It raises UntraceableError where it draws, or, where the function is not found by its name, at the end of the
        sub-module's call; CaptureError for generators that nobody can set, be it in what stays whole. What other
        threads of the script draw by these functions, as loaders of data do, is none of the trace.
        """
        before, before_held, own = other_states(), self._held_states(), threading.get_ident()

        def check() -> None:
            name = _moved(before_held, self._held_states())
            if name:
                raise refused_draws(Place(tracker.module), f"draws random numbers from {name}")
            name = _moved(before, other_states())
            if name:
                raise _untraceable(Place(tracker.module), name)

        tracker.after_calls = check
        with ExitStack() as stack:
            for title, point in _draws():

                def draw(*args: Any, title: str = title, original: Any = point.original, **kwargs: Any) -> Any:
                    if current_tracer() is not None:
                        raise _untraceable(tracker.here(), title)
                    made = original(*args, **kwargs)
                    if threading.get_ident() != own:
                        before[:] = other_states()
                    return made

                stack.enter_context(point.replaced_by(draw))
            if _numpy() is not None:
                stack.enter_context(_seeded_alone(tracker))
            yield


@contextmanager
def _seeded_alone(tracker: SourceTracker) -> Iterator[None]:
    """Code of the user makes no generator of NumPy that nobody can seed."""
    point = PatchPoint(_numpy(), "default_rng")
    original, own = point.original, threading.get_ident()

    def default_rng(seed: Any = None) -> Any:
        if seed is None and threading.get_ident() == own and belongs_to_user(sys._getframe(1).f_code.co_filename):
            raise refused_draws(tracker.here(), "makes a generator without a seed (numpy.random.default_rng())")
        return original(seed)

    with point.replaced_by(default_rng):
        yield


def _moved(before: list[tuple[str, bytes]], now: list[tuple[str, bytes]]) -> str:
    """The name of the first generator that has another state."""
    return next((name for (name, old), (_, new) in zip(before, now, strict=True) if old != new), "")


def _untraceable(place: Place, name: str) -> UntraceableError:
    cause = f"draws random numbers from {name}"
    message = f"{place} {cause}, which a captured call would draw once and keep for ever; {_ADVICE}"
    return UntraceableError(message, place, f"it {cause}")


def refused_draws(place: Place, cause: str) -> CaptureError:
    """The error for what draws from a generator that nobody sets alike on all ranks."""
    return CaptureError(
        f"{place} {cause}, which would give each rank numbers of its own; {_ADVICE}. What random and numpy.random "
        "themselves draw, in a part that stays whole, is alike on all ranks"
    )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        owner = f'sub-module "{path}"' if path else "the model"
        for name, value in vars(module).items():
            yield f'"{name}" of {owner}', value


def _variables(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for module in dict.fromkeys(type(module).__module__ for module in model.modules()):
        for name, value in list(vars(sys.modules.get(module, object)).items()):
            yield f'"{name}" of {module}', value


def _inside(value: Any) -> Iterator[Any]:
    """What a container or an object of the user holds."""
    if is_of(value, dict):
        yield from value.values()
    elif is_of(value, (list, tuple)):
        yield from value
    elif not is_of(value, (*ProxyTypes, nn.Module, type, ModuleType, FunctionType)):
        yield from getattr(value, "__dict__", {}).values()


def is_generator(value: Any) -> bool:
    """True for one of Python or NumPy that is not the one that all use."""
    numpy, kinds = _numpy(), (random.Random,)
    if numpy is not None:
        kinds = (random.Random, numpy.Generator, numpy.RandomState)  # type: ignore[assignment]  # NumPy need not be there
    return is_of(value, kinds) and not any(value is generator for _, _, generator in _modules())
