"""What a forward reads of its Python side is seen to change."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyrannc.call.guards import ModuleGuards
from pyrannc.capture import capture


class Knob:
    """Its factor is the class's until an object has one."""

    factor = 1.0


class Slots:
    """Its attributes stand in slots."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class PrivateSlots:
    """Nobody else calls what stands in its slot by that name."""

    __slots__ = ("__factor",)

    def __init__(self) -> None:
        self.set(1.0)

    def set(self, factor: float) -> None:
        self.__factor = factor

    @property
    def factor(self) -> float:
        return self.__factor


class SlotsAgain(Slots):
    """Has another slot of the same name."""

    __slots__ = ("factor",)


OfPackage = type("OfPackage", (), {"__slots__": ("factor",), "__module__": "sympy.core.basic"})


class SlotsOfPackage(OfPackage):  # type: ignore[valid-type,misc]  # it is made just before
    """All that it has stands in the slot of a base from a package."""

    __slots__ = ()

    def __init__(self) -> None:
        self.factor = 1.0


class Checked:
    """Stands in the place of a slot, which it reads and sets."""

    def __init__(self, slot: Any) -> None:
        self.slot = slot

    def __get__(self, owner: Any, kind: type) -> Any:
        return self.slot.__get__(owner, kind)

    def __set__(self, owner: Any, value: float) -> None:
        self.slot.__set__(owner, float(value))


class CheckedSlots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


CheckedSlots.factor = Checked(CheckedSlots.factor)  # type: ignore[assignment,method-assign]  # as a library may do


class SlotsAndMore(Slots):
    """Has a dictionary beside slots."""

    def __init__(self) -> None:
        super().__init__()
        self.more = 1.0


class Replaced:
    """Laid out like :class:`Slots`."""

    __slots__ = ("factor",)


class Factor(Knob):
    """Can be called."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


NUMBER, TENSOR, OBJECT, OWN = 1.0, torch.ones(2), SimpleNamespace(inner=SimpleNamespace(factor=1.0)), Knob()
SLOTS = Slots()
SCRIPT_STEPS = 0


def by_function() -> float:
    return NUMBER


class OwnSlots(nn.Module):
    """A module with a slot."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Reads(nn.Module):
    """What it computes rests on values of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = {"scale": torch.ones(2)}
        self.numbers = np.array([1.0, np.nan])
        self.share = np.float64(0.5)
        self.options: Any = {"of": [SimpleNamespace(factor=1.0)], "many": [1.0] * 100}
        self.queue = deque([1.0])
        self.slots, self.call, self.kind, self.knob = Slots(), Factor(), Factor, Knob()
        self.private, self.both, self.again = PrivateSlots(), SlotsAndMore(), SlotsAgain()
        self.of_package, self.checked, self.other = SlotsOfPackage(), CheckedSlots(), Slots()
        self.own = OwnSlots()
        self.apart = [nn.LeakyReLU(0.1)]
        self.leaf = nn.Tanh()
        self.layers = nn.ModuleList()
        self.act, self.acts, self.part = third, {"a": [third]}, functools.partial(third)
        self.helper, self.bound = Helper(), Helper().weight
        self.items = Items(inner=Items(scale=1.0, of=object()))
        self.deep, self.lists = deep(7, Settings(factor=1.0)), [[[[[[[1.0]]]]]]]
        self.like_torch, self.of_torch = LikeTorch(), OfTorch()
        self.register_buffer("prior", None)

    def by_method(self) -> float:
        return NUMBER

    def by_helper(self) -> float:
        return self.helper.weight()

    def deep_factor(self) -> float:
        return innermost(self.deep).factor  # type: ignore[no-any-return]

    @property
    def by_property(self) -> float:
        return NUMBER

    def forward(self, x: Tensor, run: Callable[[Reads, Tensor], Tensor]) -> Tensor:
        return run(self, x) * self.share


def captured_in_a_script(run: Callable[[Reads, Tensor], Tensor]) -> tuple[Reads, ModuleGuards]:
    """The script reads a variable that the model does not."""
    assert SCRIPT_STEPS >= 0
    model = Reads()
    found = capture(model, (torch.randn(4, 2), run), {}, device=torch.device("cpu"), rows=4)
    return model, ModuleGuards(model, found.python_state)


HERE = sys.modules[__name__]


@pytest.mark.parametrize(
    ("run", "change"),
    [
        (lambda _, x: x * NUMBER, lambda _, patch: patch.setattr(HERE, "NUMBER", 2.0)),
        (lambda _, x: x * by_function(), lambda _, patch: patch.setattr(HERE, "NUMBER", 2.0)),
        (lambda _, x: x * by_function(), lambda _, patch: patch.setattr(HERE, "by_function", lambda: 2.0)),
        (lambda _, x: x * next(NUMBER for _ in range(1)), lambda _, patch: patch.setattr(HERE, "NUMBER", 2.0)),
        (lambda model, x: x * model.by_method(), lambda _, patch: patch.setattr(HERE, "NUMBER", 2.0)),
        (lambda model, x: x * model.by_property, lambda _, patch: patch.setattr(HERE, "NUMBER", 2.0)),
        (lambda _, x: x * TENSOR, lambda _, patch: patch.setattr(HERE, "TENSOR", torch.zeros(2))),
        (lambda _, x: x * OBJECT.inner.factor, lambda _, patch: patch.setattr(OBJECT.inner, "factor", 2.0)),
        (lambda _, x: x * OBJECT.inner.factor, lambda _, patch: patch.setattr(OBJECT, "inner", Knob())),
        (lambda _, x: x * HERE.OBJECT.inner.factor, lambda _, patch: patch.setattr(HERE, "OBJECT", None)),
        (lambda _, x: x * OWN.factor, lambda _, patch: patch.setattr(OWN, "factor", 2.0)),
        (lambda _, x: x * OWN.factor, lambda _, patch: patch.setattr(Knob, "factor", 2.0)),
        (lambda _, x: x * Knob.factor, lambda _, patch: patch.setattr(Knob, "factor", 2.0)),
        (lambda model, x: x * model.tensors["scale"], lambda model, _: model.tensors.update(scale=torch.zeros(2))),
        (lambda model, x: x * model.numbers[0], lambda model, _: model.numbers.put(0, 2.0)),
        (lambda model, x: x * model.options["of"][0].factor, lambda model, _: vars(model.options["of"][0]).clear()),
        (lambda model, x: x * model.options["many"][0], lambda model, _: model.options["many"].append(2.0)),
        (lambda model, x: x * model.options["many"][0], lambda model, _: operator.setitem(model.options["many"], 0, 2)),
        (lambda model, x: x * model.queue[0], lambda model, _: operator.setitem(model.queue, 0, 2.0)),
        (lambda model, x: x * model.slots.factor, lambda model, _: setattr(model.slots, "factor", 2.0)),
        (lambda model, x: x * model.private.factor, lambda model, _: model.private.set(2.0)),
        (lambda model, x: x * model.both.factor, lambda model, _: setattr(model.both, "factor", 2.0)),
        (lambda model, x: x * model.both.more, lambda model, _: setattr(model.both, "more", 2.0)),
        (lambda model, x: x * model.both.more, lambda model, _: delattr(model.both, "factor")),
        (lambda model, x: x * model.again.factor, lambda model, _: setattr(model.again, "factor", 2.0)),
        (lambda model, x: x * model.of_package.factor, lambda model, _: setattr(model.of_package, "factor", 2.0)),
        (lambda model, x: x * model.checked.factor, lambda model, _: setattr(model.checked, "factor", 2.0)),
        (lambda model, x: x * model.other.factor, lambda model, _: setattr(model.other, "__class__", Replaced)),
        (lambda model, x: model.own(x), lambda model, _: setattr(model.own, "factor", 2.0)),
        (lambda _, x: x * SLOTS.factor, lambda _, patch: patch.setattr(SLOTS, "factor", 2.0)),
        (lambda model, x: model.call(x), lambda model, _: setattr(model.call, "factor", 2.0)),
        (lambda model, x: x * model.knob.factor, lambda model, _: setattr(model.knob, "factor", 2.0)),
        (lambda model, x: x * model.knob.factor, lambda _, patch: patch.setattr(Knob, "factor", 2.0)),
        (lambda model, x: x * model.kind.factor, lambda _, patch: patch.setattr(Knob, "factor", 2.0)),
        (lambda model, x: model.apart[0](x), lambda model, _: setattr(model.apart[0], "negative_slope", 0.2)),
        (lambda model, x: model.leaf(x), lambda model, _: model.leaf.add_module("late", nn.Tanh())),
        (lambda model, x: x * len(model.layers), lambda model, _: model.layers.append(nn.Tanh())),
        (lambda model, x: x * (model.prior is None), lambda model, _: setattr(model, "prior", torch.ones(2))),
        (lambda model, x: x * hasattr(model, "late"), lambda model, _: model.register_buffer("late", torch.ones(2))),
        (lambda model, x: x * model.by_method(), lambda _, patch: patch.setattr(Reads, "by_method", lambda _: 2.0)),
    ],
)
def test_what_the_model_reads_is_seen_to_change(
    run: Callable[[Reads, Tensor], Tensor], change: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, guards = captured_in_a_script(run)
    monkeypatch.setattr(HERE, "SCRIPT_STEPS", 1)
    model.share = np.float64(model.share)
    assert guards.hold()
    change(model, monkeypatch)
    assert not guards.hold()
    guards.changed()


class Settings:
    """A user's own, nested at will."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    @property
    def doubled(self) -> float:
        return 2 * self._half()

    def _half(self) -> float:
        return self.half  # type: ignore[no-any-return,attr-defined]


class ByItems:
    """Its attributes stand in a dict."""

    def __init__(self, **values: Any) -> None:
        vars(self)["_items"] = values

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self)["_items"]:
            raise AttributeError(name)
        return vars(self)["_items"][name]


class Items(dict[str, Any]):
    """Its attributes are its items."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@dataclasses.dataclass
class Options:
    """What a script has read from its command line."""

    scale: float = 1.0
    step: int = 0


class LikeTorch:
    """Of a module whose name begins like that of torch."""

    def __init__(self) -> None:
        self.factor = 1.0


LikeTorch.__module__ = "torch_utils.config"
OfTorch = type("OfTorch", (LikeTorch,), {"__module__": "torch.nn.config"})


def deep(depth: int, value: Any) -> Any:
    """A nested configuration."""
    for _ in range(depth):
        value = Settings(inner={"next": [value]})
    return value


def innermost(value: Any) -> Any:
    while hasattr(value, "inner"):
        value = value.inner["next"][0]
    return value


ARGS = argparse.Namespace(scale=1.0, step=0, best=0.0, nested=argparse.Namespace(scale=1.0), losses=[])
OPTIONS, CONFIG = Options(), {"loss": Settings(scale=1.0, step=0)}
ITEMS = [Items(inner=Items(scale=1.0, of=object()))]
HALVES, BY_ITEMS, DEEP = Settings(half=0.5), ByItems(scale=1.0), deep(7, Settings(factor=1.0))
WEIGHT, PART = Factor(), functools.partial(operator.mul, 1.0)
SHARES = functools.partial(lambda x, of: x * of.scale, of=Settings(scale=1.0))
ACT, LAYER = torch.tanh, nn.LeakyReLU(0.1)
LOG, METER = logging.getLogger(__name__), Settings(scale=1.0, count=0, sum=0, values=[])


def scaled(x: Tensor, args: Any) -> Tensor:
    return x * args.scale  # type: ignore[no-any-return]


def by_nested(x: Tensor, args: Any) -> Tensor:
    return scaled(x, args.nested)


def by_text(x: Tensor, args: Any) -> Tensor:
    return x * getattr(args, "late", 1.0)


def by_computed_name(x: Tensor, args: Any, name: str = "sc") -> Tensor:
    return x * getattr(args, name + "ale")


def names_of_its_own(x: Tensor, args: Any) -> Tensor:
    """Of its names none is of what the script counts."""
    name = "relu" if args.scale else "tanh"
    for item in {0: x}.values():
        x = getattr(torch, name)(item) * x.count_nonzero().sum()
    return x


def by_all(x: Tensor, args: Any) -> Tensor:
    return x * dict(vars(args))["scale"]


def second() -> float:
    return third()


def third() -> float:
    return NUMBER


@functools.wraps(third)
def wrapped() -> float:
    return 2 * (wrapped.__wrapped__() - 0.5)  # type: ignore[attr-defined,no-any-return]


def decorated(function: Callable[[], float]) -> Callable[[], float]:
    def inner() -> float:
        return function()

    return inner


BY_DECORATOR, CACHED = decorated(third), functools.partial(third)
FUNCTIONS: dict[str, Any] = {"third": third}


def imports_name() -> float:
    from guards_of_user.config import SCALE

    return SCALE  # type: ignore[no-any-return]


def imports_module() -> float:
    import guards_of_user.config

    return guards_of_user.config.SCALE  # type: ignore[no-any-return]


def imports_under_a_name() -> float:
    from guards_of_user import config as known

    return known.NESTED.scale  # type: ignore[no-any-return]


@pytest.fixture
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of the user with a Python module of settings."""
    package = tmp_path / "guards_of_user"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "from types import SimpleNamespace\nSCALE = 1.0\nNESTED = SimpleNamespace(scale=1.0)\n"
    (package / "config.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("guards_of_user", "guards_of_user.config"):
        sys.modules.pop(name, None)


def imported() -> Any:
    return sys.modules["guards_of_user.config"]


class Helper:
    """Of a model; what it gives rests on a global."""

    def weight(self) -> float:
        return self._weight()

    def _weight(self) -> float:
        return NUMBER

    def __call__(self) -> float:
        return NUMBER


def number(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HERE, "NUMBER", 2.0)


@pytest.mark.parametrize(
    ("run", "change"),
    [
        (lambda _, x: scaled(x, ARGS), lambda _, patch: patch.setattr(ARGS, "scale", 2.0)),
        (lambda _, x: scaled(x, args=OPTIONS), lambda _, patch: patch.setattr(OPTIONS, "scale", 2.0)),
        (lambda _, x: scaled(x, CONFIG["loss"]), lambda _, patch: patch.setattr(CONFIG["loss"], "scale", 2.0)),
        (lambda _, x: scaled(x, BY_ITEMS), lambda _, patch: patch.setitem(vars(BY_ITEMS)["_items"], "scale", 2.0)),
        (lambda _, x: by_nested(x, ARGS), lambda _, patch: patch.setattr(ARGS.nested, "scale", 2.0)),
        (lambda _, x: by_text(x, ARGS), lambda _, patch: patch.setattr(ARGS, "late", 2.0, raising=False)),
        (lambda _, x: by_computed_name(x, ARGS), lambda _, patch: patch.setattr(ARGS, "scale", 2.0)),
        (lambda _, x: by_all(x, ARGS), lambda _, patch: patch.setattr(ARGS, "scale", 2.0)),
        (lambda _, x: x * HALVES.doubled, lambda _, patch: patch.setattr(HALVES, "half", 2.0)),
        (lambda _, x: x * HALVES._half(), lambda _, patch: patch.setattr(HALVES, "half", 2.0)),
        (lambda _, x: x * innermost(DEEP).factor, lambda _, patch: patch.setattr(innermost(DEEP), "factor", 2.0)),
        (lambda _, x: WEIGHT(x), lambda _, patch: patch.setattr(WEIGHT, "factor", 2.0)),
        (lambda _, x: WEIGHT(x), lambda _, patch: patch.setattr(Knob, "factor", 2.0)),
        (lambda _, x: WEIGHT(x), lambda _, patch: patch.setattr(HERE, "WEIGHT", OWN)),
        (lambda _, x: PART(x), lambda _, patch: patch.setattr(HERE, "PART", OWN)),
        (lambda _, x: SHARES(x), lambda _, patch: patch.setattr(SHARES.keywords["of"], "scale", 2.0)),
        (lambda _, x: SHARES(x), lambda _, patch: patch.setitem(SHARES.keywords, "of", OWN)),
        (lambda _, x: ACT(x), lambda _, patch: patch.setattr(HERE, "ACT", torch.sigmoid)),
        (lambda _, x: LAYER(x), lambda _, patch: patch.setattr(HERE, "LAYER", nn.Tanh())),
        (lambda _, x: x * second(), number),
        (lambda _, x: x * wrapped(), number),
        (lambda _, x: x * BY_DECORATOR(), number),
        (lambda _, x: x * CACHED(), number),
        (lambda _, x: x * FUNCTIONS["third"](), number),
        (lambda _, x: x * Helper().weight(), number),
        (lambda model, x: x * model.act(), number),
        (lambda model, x: x * model.acts["a"][0](), number),
        (lambda model, x: x * model.part(), number),
        (lambda model, x: x * model.bound(), number),
        (lambda model, x: x * model.helper(), number),
        (lambda model, x: x * model.by_helper(), number),
        (lambda model, x: x * model.deep_factor(), lambda model, _: setattr(innermost(model.deep), "factor", 2.0)),
        (lambda model, x: x * model.lists[0][0][0][0][0][0][0], lambda model, _: innermost_list(model).append(2.0)),
        (lambda model, x: x * model.items.inner.scale, lambda model, _: model.items["inner"].update(scale=2.0)),
        (lambda _, x: x * ITEMS[0].inner.scale, lambda _, patch: patch.setitem(ITEMS[0]["inner"], "scale", 2.0)),
        (lambda model, x: x * model.like_torch.factor, lambda model, _: setattr(model.like_torch, "factor", 2.0)),
        (lambda _, x: x * imports_name(), lambda _, patch: patch.setattr(imported(), "SCALE", 2.0)),
        (lambda _, x: x * imports_module(), lambda _, patch: patch.setattr(imported(), "SCALE", 2.0)),
        (lambda _, x: x * imports_under_a_name(), lambda _, patch: patch.setattr(imported().NESTED, "scale", 2.0)),
    ],
)
@pytest.mark.usefixtures("user_package")
def test_what_is_read_in_a_roundabout_way_is_seen_to_change(
    run: Callable[[Any, Tensor], Tensor], change: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, guards = captured_in_a_script(run)
    assert guards.hold()
    change(model, monkeypatch)
    assert not guards.hold()
    guards.changed()


def innermost_list(model: Any) -> list[float]:
    found = model.lists
    while isinstance(found[0], list):
        found = found[0]
    return found  # type: ignore[no-any-return]


def logs(x: Tensor, args: Any, meter: Settings) -> Tensor:
    LOG.debug("scale %s", args.scale)
    return x * args.scale  # type: ignore[no-any-return]


def trains(_: Any) -> None:
    """What a script does after each call."""
    ARGS.step += 1
    ARGS.best = 0.5 * ARGS.step
    ARGS.losses.append(0.5)
    METER.count += 1
    METER.sum += 1
    METER.values.append(1.0)
    LOG.isEnabledFor(ARGS.step)
    LOG.addFilter(lambda _: True)
    CONFIG["loss"].step += 1
    OPTIONS.step += 1


@pytest.mark.parametrize(
    "run",
    [
        lambda _, x: logs(x, ARGS, METER),
        lambda _, x: scaled(x, CONFIG["loss"]),
        lambda _, x: scaled(x, OPTIONS),
        lambda _, x: names_of_its_own(scaled(x, METER), ARGS),
        lambda model, x: x * model.of_torch.factor,
    ],
)
def test_what_a_script_counts_beside_the_model_changes_nothing(run: Callable[[Any, Tensor], Tensor]) -> None:
    model, guards = captured_in_a_script(run)
    trains(model)
    model.of_torch.factor = 2.0
    assert guards.hold()
