"""What a forward puts into its arguments."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import pyrannc
from pyrannc.capture import flatten
from pyrannc.capture.reads.handed_back import as_given
from pyrannc.capture.user.absent import Absent
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
FORCED = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}


class Fills(nn.Module):
    """Leaves results in a dict, an object, what that holds, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, batch: dict[str, Tensor], found: Any, layers: list[Tensor]) -> Tensor:
        x = batch.pop("bias") + batch["x"]
        batch["x"] = batch["x"] * 2
        found.hidden = self.first(x).tanh()
        found.deep["size"] = found.hidden.abs().mean()
        found.calls += 1
        layers.append(found.hidden.detach())
        return self.second(found.hidden).square().mean()  # type: ignore[no-any-return]


def trained(world: int, rank: int) -> list[Any]:
    torch.manual_seed(0)
    net = Fills().double()
    model: Any = net if world == 1 else pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found = SimpleNamespace(deep={}, calls=0)
    made: list[Any] = []
    for _ in range(3):
        batch = {name: torch.randn(8, 4, dtype=torch.float64).chunk(world)[rank] for name in ("x", "bias")}
        layers: list[Tensor] = []
        loss = model(batch, found, layers)
        (loss + found.deep["size"]).backward()
        made += [loss.item(), found.calls, found.deep["size"].item(), "bias" in batch, len(layers)]
        made += [whole(tensor, world) for tensor in (batch["x"], found.hidden.detach(), layers[0])]
    grad_of = (lambda name: net.get_parameter(name).grad) if world == 1 else model.get_param_grad
    return [*made, *(grad_of(name) for name, _ in net.named_parameters())]


def whole(rows: Tensor, world: int) -> Tensor:
    return rows if world == 1 else torch.cat(gathered(rows))


def gathered(item: Any) -> list[Any]:
    found: list[Any] = [None] * pyrannc.get_world_size()
    torch.distributed.all_gather_object(found, item)
    return found


def decoded(world: int, rank: int) -> list[Any]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).double().eval()
    ids, cache = torch.randint(20, (4, 5)).chunk(world)[rank], DynamicCache()
    model: Any = copy.deepcopy(net) if world == 1 else pyrannc.RaNNCModule(net)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        following = logits[:, -1:].argmax(-1)
        later = model(input_ids=following, past_key_values=cache, use_cache=True).logits
    return [whole(logits, world), whole(later, world), cache.get_seq_length()]


def on_a_rank(made: Callable[[int, int], list[Any]]) -> list[Any]:
    return made(2, pyrannc.get_rank())


@pytest.mark.parametrize("made", [trained, decoded])
def test_what_a_forward_puts_into_its_arguments_is_there(made: Callable[[int, int], list[Any]], ranks: Ranks) -> None:
    expected = made(1, 0)
    for found in ranks(2).run(on_a_rank, made, env=FORCED):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, found: Any) -> Tensor:
        found.hidden = self.linear(x)
        raise ValueError("not today")


def fail() -> None:
    model, found = pyrannc.RaNNCModule(Fails()), SimpleNamespace()
    with pytest.raises(pyrannc.RaNNCError, match="not today"):
        model(torch.randn(2, 4), found)
    assert not vars(found)


class Moves(nn.Module):
    """Changes containers, and puts others in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, parts: list[dict[str, Tensor]], info: dict[str, Any]) -> Tensor:
        first = parts.pop(0)
        first["made"] = self.linear(first["x"] + x * parts[0]["x"])
        parts.append({"other": first["made"] * 2})
        info["old"]["seen"], info["old"] = True, {"new": first["made"].detach()}
        return first["made"].square().mean()


def move() -> None:
    made = []
    for wrap in (lambda net: net, pyrannc.RaNNCModule):
        torch.manual_seed(0)
        model: Any = wrap(Moves().double())
        for _ in range(2):
            x, old = torch.randn(3, 4, dtype=torch.float64), {}
            first: dict[str, Tensor] = {"x": x}
            parts, info = [first, {"x": x + 1}], {"old": old}
            loss = model(x, parts, info)
            assert old == {"seen": True}
            assert first["x"] is x
            made.append([loss, first["made"], [[*part] for part in parts], parts[-1]["other"], info["old"]["new"]])
    for plain, own in zip(made[:2], made[2:], strict=True):
        assert plain[2] == own[2]
        torch.testing.assert_close([*plain[:2], *plain[3:]], [*own[:2], *own[3:]], rtol=1e-12, atol=0)


class Passes(nn.Module):
    """Changes what it is given, and returns it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor, given: Any) -> Any:
        y = self.linear(x)
        if self.kind == "dict":
            given["x"] = y
            return given
        if self.kind == "list":
            given.append(y * given[0])
            return {"out": y, "hidden": given}
        if self.kind == "object":
            given.made = {"y": y * given.x}
            return given
        given["calls"] += 1
        given["rows"] = x.shape[0]
        return y


def pass_on(kind: str, trains: bool) -> None:
    made = []
    for wrap in (lambda net: net, pyrannc.RaNNCModule):
        torch.manual_seed(0)
        model: Any = wrap(Passes(kind).double())
        x = torch.randn(3, 4, dtype=torch.float64)
        kinds = {"dict": {"x": x}, "list": [x], "object": SimpleNamespace(x=x), "counter": Counter(calls=2)}
        given: Any = kinds[kind]
        with torch.set_grad_enabled(trains):
            result = model(x, given)
        if kind == "counter":
            assert given["calls"] == 3
            assert given["rows"] == 3 if wrap is not pyrannc.RaNNCModule else isinstance(given["rows"], Absent)
        made.append(flatten((result, None if kind == "counter" else given))[0])
    torch.testing.assert_close(*made, rtol=1e-12, atol=0)


@dataclass
class Found:
    scale: float = 2.0
    made: Any = None


@dataclass(slots=True)
class Slotted:
    scale: float = 2.0
    made: Any = None


class Slots:
    __slots__ = ("factor", "made")


class Again(Slots):
    """Has other slots of the same names."""

    __slots__ = ("factor", "made")


class Frozen(Slots):
    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value.clone())


class Called:
    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor  # type: ignore[attr-defined, no-any-return]  # set by whoever has it


class OwnDict(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value * 1)


class OwnList(list[Any]):
    def __init__(self, *items: Any) -> None:
        super().__init__([*items, None])


class Private:
    __slots__ = ("__factor", "made")

    @property
    def factor(self) -> Tensor:
        return self.__factor

    @factor.setter
    def factor(self, factor: Tensor) -> None:
        self.__factor = factor


class Delegates:
    """What it does not have itself, it asks of what it holds."""

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = SimpleNamespace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name == "inner" else setattr(self.inner, name, value)


class Mirrors(dict[str, Any]):
    """Its items are attributes too."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        object.__setattr__(self, name, value)


class Beside(list[Any]):
    """Has attributes beside its items, and another way to be read."""

    def __init__(self) -> None:
        super().__init__([None])
        self.scale = 1.0

    def __iter__(self) -> Any:
        return iter(enumerate(super().__iter__()))


class Multiplies(nn.Module):
    """Uses and changes what it is given, of whatever class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = self.linear(x)
        made = y.square().mean()
        if isinstance(given, dict):
            given["made"] = made
            return (y * given["factor"]).mean()
        if isinstance(given, list):
            given.append(made)
            return (y * given[0] * getattr(given, "scale", 1.0)).mean()
        given.made = made
        return (given(y) if callable(given) else y * given.factor).mean()


def _give(holder: Any, factor: Tensor) -> Any:
    if isinstance(holder, dict):
        holder["factor"] = factor
    elif isinstance(holder, list):
        holder[0] = factor
        del holder[1:]
        holder.scale = float(factor.sum() > 0) + 1  # type: ignore[attr-defined]  # of a class of its own
    else:
        holder.factor = factor
    return holder


def hold(make: Callable[[], Any], rows: bool) -> None:
    made = []
    for wrap in (lambda net: net, pyrannc.RaNNCModule):
        torch.manual_seed(0)
        model: Any = wrap(Multiplies().double())
        given = make()
        for call in range(4):
            given = make() if call == 2 else given
            x = torch.randn(3, 4, dtype=torch.float64)
            loss = model(x, _give(given, torch.randn(3 if rows else 1, 4, dtype=torch.float64)))
            if isinstance(given, Mirrors):
                assert given.made is given["made"]  # type: ignore[attr-defined]  # set by itself
            held = given["made"] if isinstance(given, dict) else given[-1] if isinstance(given, list) else given.made
            (loss + held).backward()
            made.append([loss.detach(), held.detach()])
        made.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(made[:5], made[5:], rtol=1e-12, atol=1e-14)


def find(make: Callable[[], Any]) -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, found: Any) -> Tensor:
            found.made = self.linear(x) * getattr(found, "scale", 1.0)
            return x * 2

    model: Any = pyrannc.RaNNCModule(Fills().double())
    for _ in range(3):
        x, found = torch.randn(3, 4, dtype=torch.float64), make()
        model(x, found)
        torch.testing.assert_close(found.made, model.model.linear(x) * getattr(found, "scale", 1.0))
    assert model._variants.made == 1


@pytest.mark.parametrize("job", [fail, move])
def test_arguments_of_one_process(job: Callable[[], None], ranks: Ranks) -> None:
    ranks(1).run(job)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", ["dict", "list", "object", "counter"])
def test_what_is_returned_may_be_what_was_given(kind: str, trains: bool, ranks: Ranks) -> None:
    ranks(1).run(pass_on, kind, trains)


HOLDERS: list[Callable[[], Any]] = [
    Slots, Again, Frozen, Private, Delegates, Called, SimpleNamespace, OwnDict, Mirrors, OwnList, Beside,
]  # fmt: skip


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("make", HOLDERS)
def test_a_holder_of_any_class_is_looked_into_at_each_call(make: Callable[[], Any], rows: bool, ranks: Ranks) -> None:
    ranks(1).run(hold, make, rows)


@pytest.mark.parametrize("make", [SimpleNamespace, Found, Slotted])
def test_new_objects_that_are_alike_take_one_capture(make: Callable[[], Any], ranks: Ranks) -> None:
    ranks(1).run(find, make)


class Pathlike(PosixPath):
    pass


class Shown(Slots):
    @property
    def made(self) -> str:  # type: ignore[override]  # it hides the slot
        raise RuntimeError("nobody asks")


def test_a_list_that_is_changed_and_replaced_by_its_equal_is_given_as_before() -> None:
    given = {"ids": [1]}
    before = given["ids"]
    with as_given(given):
        before.append(2)
        given["ids"] = before[:]
    assert given["ids"] is before
    assert before == [1]


def test_structures_are_those_of_what_is_held() -> None:
    path, shown, mixed = Pathlike("a/b"), Shown(), Beside()
    before = flatten(path)[1]
    assert str(path) == "a/b"
    assert flatten(path)[1] == before
    Slots.made.__set__(shown, torch.ones(2))  # type: ignore[attr-defined]  # a slot
    found, structure = flatten(shown)
    assert [*found] == [found[0]]
    assert Slots.made.__get__(structure.rebuild(found)) is found[0]  # type: ignore[attr-defined]  # likewise
    structures = []
    for mixed.scale in (1.0, 2.0):
        structures.append(flatten(mixed)[1])
    assert structures[0] != structures[1]
    with as_given(mixed):
        pass
    assert [*list.__iter__(mixed)] == [None]
