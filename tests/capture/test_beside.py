"""What a traced call leaves beside the model's attributes: put back, and what stands for it."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyrannc.call.guards import ModuleGuards
from pyrannc.capture import Captured, capture
from pyrannc.capture.reads.counted import Trial, trials
from pyrannc.capture.user.holders import NOTHING, Name
from pyrannc.capture.user.left import Unset, lift
from pyrannc.errors import CaptureError, RaNNCError


class Holder:
    """Has a slot, too."""

    __slots__ = ("__dict__", "slot")
    shared: Any = None

    def __init__(self) -> None:
        self.aux: Any = None
        self.items: list[Any] = []
        self.count = 0


HOLDER = Holder()
TABLE: dict[Any, Any] = {}
LAST: Any = None
LOOKED_UP: Any = None


class Leaves(nn.Module):
    """Runs a function on itself and the mean of what it computes."""

    def __init__(self, leave: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.leave = leave
        self.inner = nn.Linear(3, 3)
        self.holder = Holder()
        self.space = SimpleNamespace(aux=1)
        self.nested: dict[str, Any] = {"list": [], "deque": deque([1])}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.leave(self, y.mean())
        return y


def captured(model: nn.Module) -> Captured:
    return capture(model, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4)


def put(made: Captured) -> None:
    for unsets in made.python_state.unset:
        unsets.put()


def last(_: Any, h: Tensor) -> None:
    global LAST
    LAST = h


def slot(_: Any, h: Tensor) -> None:
    HOLDER.slot = h


def shared(_: Any, h: Tensor) -> None:
    Holder.shared = h


def entry(_: Any, h: Tensor) -> None:
    TABLE["norms"] = [h, 1]


def new_name(net: Any, h: Tensor) -> None:
    net.space.other = {"h": h}


def row(net: Any, h: Tensor) -> None:
    net.nested["list"].append(h)


def turned(net: Any, h: Tensor) -> None:
    net.nested["deque"].appendleft(h)


def default(_: Any, h: Tensor, kept: dict[str, Any] = {}) -> None:  # noqa: B006  # this is the case
    kept["h"] = h


def own(net: Any, h: Tensor) -> None:
    own.last = h  # type: ignore[attr-defined]  # functions have what is set


PLACES: dict[Callable[..., None], tuple[Callable[[Any], Any], Any, str]] = {
    last: (lambda _: LAST, None, 'global variable "LAST"'),
    slot: (lambda _: getattr(HOLDER, "slot", NOTHING), NOTHING, 'global variable "HOLDER.slot"'),
    shared: (lambda _: Holder.shared, None, 'attribute "shared" of class Holder'),
    entry: (lambda _: TABLE.get("norms", NOTHING), NOTHING, "global variable \"TABLE['norms']\""),
    new_name: (lambda net: vars(net.space).get("other", NOTHING), NOTHING, 'attribute "space.other" of the model'),
    row: (lambda net: net.nested["list"][-1:], [], "attribute \"nested['list'][0]\" of the model"),
    turned: (lambda net: list(net.nested["deque"]), [1], "attribute \"nested['deque'][0]\" of the model"),
    default: (lambda _: default.__defaults__[0].get("h", NOTHING), NOTHING, "function default"),  # type: ignore[index]
    own: (lambda _: vars(own).get("last", NOTHING), NOTHING, 'attribute "last" of function own'),
}


@pytest.mark.parametrize("leave", PLACES, ids=lambda leave: leave.__name__)
def test_what_is_left_is_put_back_and_reading_it_raises(leave: Callable[..., None]) -> None:
    read, before, called = PLACES[leave]
    model = Leaves(leave)
    made = captured(model)
    assert read(model) == before
    (unsets,) = made.python_state.unset
    put(made)
    now = read(model)
    stands = next(item for item in (now if isinstance(now, list) else [now]) if isinstance(item, Unset))
    assert called in str(stands)
    with pytest.raises(RaNNCError, match="return it from the forward instead"):
        stands + torch.ones(())
    put(made)
    assert len([item for item in unsets.holder.contents().values() if isinstance(item, Unset)]) == 1
    # A later capture finds what was there.
    assert captured(model).graph_json == made.graph_json
    lift(unsets.holder)
    assert read(model) == before


def test_guards_do_not_watch_what_the_forward_sets() -> None:
    model = Leaves(lambda net, h: (entry(net, h), setattr(net.holder, "aux", h), net.holder.items.append(h)))
    made = captured(model)
    put(made)
    guards = ModuleGuards(model, made.python_state)
    assert guards.hold()
    TABLE["norms"] = 0.0
    assert guards.hold()
    TABLE.clear()
    model.holder.items.clear()
    assert guards.hold()
    put(made)
    assert guards.hold()
    assert isinstance(TABLE["norms"], Unset)
    TABLE["other"] = 1
    assert not guards.hold()
    TABLE.clear()
    model.holder.count = 1
    assert not guards.hold()


def test_a_function_that_is_looked_up_once_stays() -> None:
    global LOOKED_UP
    LOOKED_UP = None

    def look_up(net: Any, h: Tensor) -> None:
        global LOOKED_UP
        LOOKED_UP = LOOKED_UP or look_up

    captured(Leaves(look_up))
    assert LOOKED_UP is look_up


def test_tensors_of_sizes_alone_are_put_back_and_named() -> None:
    TABLE.clear()

    @functools.lru_cache
    def ramp(width: int) -> Tensor:
        return torch.arange(width)

    def leave(net: Any, h: Tensor) -> None:
        TABLE.setdefault(3, torch.arange(3))
        ramp(3)

    made = captured(Leaves(leave))
    assert not TABLE
    assert ramp.cache_info().currsize == 0
    assert not made.python_state.unset
    assert [str(name) for name in made.python_state.cached] == [f'global variable "TABLE[3]" of {__name__}']


def test_other_objects_keep_what_earlier_calls_of_a_function_have_cached() -> None:
    @functools.lru_cache
    def text(width: int) -> str:
        return str(width)

    captured(Leaves(lambda net, h: text(3)))
    assert text.cache_info().currsize == 1


def reads_before(net: Any, h: Tensor) -> Tensor:
    before, TABLE["mean"] = TABLE.get("mean"), h
    return h if before is None else h + before


def asks_before(net: Any, h: Tensor) -> Tensor:
    before, net.holder.aux = net.holder.aux, h
    return h if before is None else 2 * h


def sums_all(net: Any, h: Tensor) -> Tensor:
    net.holder.items.append(h)
    return sum(net.holder.items)  # type: ignore[return-value]


class Returns(nn.Module):
    def __init__(self, result: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.result = result
        self.inner = nn.Linear(3, 3)
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return self.result(self, self.inner(x))


@pytest.mark.parametrize("result", [reads_before, asks_before, sums_all], ids=lambda result: result.__name__)
def test_a_forward_that_reads_what_an_earlier_call_has_left_is_refused(result: Any) -> None:
    TABLE.clear()
    with pytest.raises(CaptureError, match="reads a tensor that an earlier call of the model has left"):
        captured(Returns(result))
    assert not TABLE


def counts(net: Any, h: Tensor) -> Tensor:
    TABLE["calls"] = TABLE.get("calls", 0) + 1
    return h / TABLE["calls"]


def test_a_counter_that_decides_is_refused_and_put_back() -> None:
    TABLE.clear()
    with pytest.raises(CaptureError, match=r"counts from call to call: .*TABLE\['calls'\]"):
        captured(Returns(counts))
    assert not TABLE


def late(net: Any, h: Tensor) -> Tensor:
    net.holder.count += 1
    return h if net.holder.count < 1000 else 2 * h


def every(net: Any, h: Tensor) -> Tensor:
    TABLE["calls"] = (TABLE.get("calls", (0, ""))[0] + 1, "calls")
    return 2 * h if TABLE["calls"][0] % 4 == 0 else h


def less(net: Any, h: Tensor) -> Tensor:
    TABLE["left"] = TABLE.get("left", 100.0) - 1
    return h if TABLE["left"] > 0 else 2 * h


def full(net: Any, h: Tensor) -> Tensor:
    net.holder.items.append(0.5)
    return h if len(net.holder.items) < 100 else 2 * h


def ends(net: Any, h: Tensor) -> Tensor:
    net.holder.count += 1
    return h * [1, 1, 1, 2][net.holder.count - 1]


def third_of_four(net: Any, h: Tensor) -> Tensor:
    net.holder.count += 1
    return 2 * h if net.holder.count > 2 and net.holder.count % 4 == 3 else h


def in_turn(net: Any, h: Tensor) -> Tensor:
    TABLE["phase"] = (TABLE.get("phase", 0) + 1) % 50
    return 2 * h if TABLE["phase"] == 40 else h


def rarely(net: Any, h: Tensor) -> Tensor:
    net.holder.count += 2
    done = -net.holder.count // 7.0 * 0.25
    return h if done > -100 or max(0, 900 - net.holder.count) else h + 1


ARRAY = np.zeros((2, 2))


def in_an_array(net: Any, h: Tensor) -> Tensor:
    ARRAY[1, 0] += 1
    return h if ARRAY[1, 0] < 1000 else 2 * h


def of_numpy(net: Any, h: Tensor) -> Tensor:
    net.holder.count += np.int64(1)
    return h if net.holder.count < 1000 else 2 * h


def third_item(net: Any, h: Tensor) -> Tensor:
    net.holder.items.append(0.5)
    return 2 * h if len(net.holder.items) % 40 == 39 else h


def by_bits(net: Any, h: Tensor) -> Tensor:
    net.holder.count += 1
    return h.sin() if (net.holder.count >> 2) & 3 ^ 2 == 0 and not 8 % net.holder.count else h


def reads(net: Any, h: Tensor) -> Tensor:
    net.holder.count += 1
    return h if net.holder.count % 100 else h * float(h.detach().numpy().sum())


LATE = [
    late,
    every,
    less,
    full,
    ends,
    reads,
    third_of_four,
    in_turn,
    rarely,
    by_bits,
    in_an_array,
    of_numpy,
    third_item,
]


@pytest.mark.parametrize("result", LATE, ids=lambda result: result.__name__)
def test_what_matters_only_after_many_calls_is_refused(result: Any) -> None:
    TABLE.clear()
    model = Returns(result)
    with pytest.raises(CaptureError, match="counts from call to call"):
        captured(model)
    assert (TABLE, model.holder.count, model.holder.items, ARRAY.any()) == ({}, 0, [], False)


def logs(net: Any, h: Tensor) -> Tensor:
    net.holder.count += 1
    net.holder.items.append(net.holder.count)
    TABLE["calls"] = TABLE.get("calls", 0) + 1
    if TABLE["calls"] % 100 == 0:
        TABLE["told"] = f"{net.holder.items[-1]} calls"
    ARRAY[0] += 0.5
    return h


def test_what_is_counted_for_a_log_is_put_back() -> None:
    TABLE.clear()
    model = Returns(logs)
    captured(model)
    assert (TABLE, model.holder.count, model.holder.items, ARRAY.any()) == ({}, 0, [], False)


def ring(net: Any, h: Tensor) -> Tensor:
    TABLE.setdefault("times", [0.0] * 100)[net.holder.count] = 0.5
    net.holder.count = (net.holder.count + 1) % 100
    return h


def budget(net: Any, h: Tensor) -> Tensor:
    TABLE["left"] = TABLE.get("left", 1000) - 1
    assert TABLE["left"] >= 0
    print(TABLE["left"])
    return h


@pytest.mark.parametrize("result", [ring, budget])
def test_what_cannot_be_counted_so_far_is_looked_at_earlier(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.clear()
    model = Returns(result)
    captured(model)
    assert (TABLE, model.holder.count) == ({}, 0)
    assert "-" not in capsys.readouterr().out


def _forever() -> Iterator[float]:
    count = 0
    while True:
        count += 1
        yield 1.0 if count < 4 else 2.0


def _of_a_loop() -> Iterator[int]:
    for _ in [1, 1, 1, 2]:  # noqa: UP028  # it is held by the loop alone
        yield _


def _after(calls: int, iterator: Iterator[Any]) -> Iterator[Any]:
    for _ in range(calls):
        next(iterator)
    return iterator


ITERATORS: list[Callable[[], Iterator[Any]]] = [
    itertools.count,
    _forever,
    _of_a_loop,
    lambda: iter([1, 1, 2]),
    lambda: iter(range(1000)),
    lambda: iter({1: 1, 2: 1}),
    lambda: reversed((1, 1)),
    lambda: iter(deque([1, 1, 2])),
    lambda: itertools.cycle([1, 1, 2]),
    lambda: _after(3, itertools.cycle([1, 1, 2])),
    lambda: _after(5, itertools.cycle([1, 1, 2])),
    lambda: itertools.tee([1, 1, 2])[1],
    lambda: _after(1, _after(2, itertools.tee([1, 1, 2, 1, 2])[0])),
    lambda: itertools.repeat(1, 3),
    lambda: itertools.chain([1], [1, 2]),
    lambda: map(float, [1, 1, 2]),
    lambda: itertools.islice(_forever(), 5),
    lambda: (one for pair in zip([1, 1], enumerate([1, 2]), strict=True) for one in pair[:1]),
]


@pytest.mark.parametrize("make", ITERATORS)
def test_a_forward_that_takes_from_an_iterator_is_refused(make: Callable[[], Iterator[Any]]) -> None:
    model = Returns(lambda net, h: h * next(net.held))
    model.held = make()  # type: ignore[assignment]  # a module has whatever is set
    with pytest.raises(CaptureError, match='takes what comes next from an iterator, the attribute "held" of the model'):
        captured(model)


@pytest.mark.parametrize("make", ITERATORS)
def test_an_iterator_from_which_a_forward_takes_nothing_stays(make: Callable[[], Iterator[Any]]) -> None:
    model = Returns(lambda net, h: h if net.held is None else 2 * h)
    model.held, other = make(), make()  # type: ignore[assignment]  # likewise
    captured(model)
    assert list(itertools.islice(model.held, 3)) == list(itertools.islice(other, 3))


def test_a_generator_that_calls_the_model_takes_nothing() -> None:
    model = Returns(lambda net, h: h if net.held is None else 2 * h)

    def calls() -> Iterator[Captured]:
        for _ in range(2):
            yield captured(model)

    model.held = calls()  # type: ignore[assignment]  # likewise
    assert len(list(model.held)) == 2


@pytest.mark.parametrize(
    ("held", "unseen"),
    [
        (dict.fromkeys(map(str, range(50_000)), 1), None),
        ([("word", number) for number in range(30_000)], None),
        ([[("word", number) for number in range(1000)] for _ in range(30)], None),
        ([[] for _ in range(5000)], r'attribute "held" of the model'),
        ([[[] for _ in range(1000)] for _ in range(30)], r"attribute \"held\[\d+\]\[\d+\]\" of the model"),
    ],
)
def test_where_there_is_too_much_to_look_after_is_known(held: Any, unseen: str | None) -> None:
    model = Returns(lambda net, h: h * len(net.held))
    model.held = held
    found = captured(model).python_state.unseen
    assert found is None if unseen is None else re.fullmatch(unseen, str(found))


class Table(dict[str, Any]):
    """Has attributes, too."""

    total: Any = None


def test_attributes_of_containers_are_put_back() -> None:
    def leave(net: Any, h: Tensor) -> None:
        net.table.total = net.holder.items[0].total = h

    model = Leaves(leave)
    model.table, model.holder.items = Table(), [Table()]  # type: ignore[assignment]  # a module has whatever is set
    put(captured(model))
    for table in (model.table, model.holder.items[0]):
        with pytest.raises(RaNNCError, match=r"total.*is set by the forward"):
            table.total.item()


def test_two_lists_that_are_filled_do_not_change_for_guards() -> None:
    def leave(net: Any, h: Tensor) -> None:
        net.nested["first"].append(h.sum())
        net.nested["second"].append(h)

    model = Leaves(leave)
    model.nested.update(first=[], second=[3])
    made = captured(model)
    put(made)
    guards = ModuleGuards(model, made.python_state)
    assert guards.hold()


def test_a_list_that_is_changed_and_replaced_by_its_equal_is_put_back() -> None:
    def leave(net: Any, h: Tensor) -> None:
        net.nested["list"][0].append(1)
        net.nested["list"][0] = net.nested["list"][0][:]

    model = Leaves(leave)
    before = [0]
    model.nested["list"].append(before)
    captured(model)
    assert model.nested["list"][0] is before
    assert before == [0]


def test_what_stands_for_another_is_not_asked() -> None:
    model = Leaves(lambda _, h: None)
    helper = Leaves(lambda _, h: None)
    model.holder.aux, model.holder.count = weakref.proxy(model), weakref.proxy(helper)
    captured(model)
    assert model.holder.aux.holder is model.holder


DEAD: dict[str, Any] = {}


@pytest.mark.parametrize("of", [set, lambda: lambda: None])
def test_what_stands_for_what_is_no_more_is_let_be(of: Callable[[], Any]) -> None:
    owner = of()
    proxy = weakref.proxy(owner)
    model = Leaves(lambda net, _: (net.space.aux, Holder.shared, DEAD, net.nested))
    model.aux, model.space.aux, Holder.shared, DEAD["it"] = proxy, [proxy], proxy, (1, proxy)
    model.nested["partial"] = functools.partial(print, proxy)
    del owner
    try:
        guards = ModuleGuards(model, captured(model).python_state)
        assert guards.hold()
        assert guards.changed() is None
    finally:
        Holder.shared = None
        DEAD.clear()


def test_what_stands_for_nothing_may_be_copied() -> None:
    unset = Unset(Name("attribute", ("aux",), "the model"), NOTHING)
    assert copy.deepcopy(unset).before is NOTHING


def test_whole_numbers_are_followed() -> None:
    """What is made of a number that is followed is what is made of a plain one, and what is asked of it is noted."""
    trial = Trial(3)
    number = trial.counted(lambda call: 10 * call)
    made = [number + 1, 1 + number, 2**number, number**2, 7 % number, -number, number // 4, divmod(number, 7), ~number]
    assert made == [31, 31, 2**30, 900, 7, -30, 7, (4, 2), -31]
    assert copy.deepcopy(number) == 30
    assert type(copy.deepcopy(number)) is int
    assert f"{number} {number:04d}" == "30 0030"
    assert (number == None, number != "30", number in (1, 30)) == (False, True, True)  # noqa: E711  # this is the case
    assert torch.ones(()) * number == number * torch.ones(()) == torch.tensor(30.0)
    for asks in (bool, int, float, hash, lambda it: it > 4, lambda it: it / 7, lambda it: 30 - it == 0):
        other = Trial(3)
        asks(other.counted(lambda call: 10 * call if call < 9 else 0))
        assert [other.stands_for(call) for call in (3, 9)] == [True, False]
    growing = Trial(3)
    growing.follow_length(items := [1, 2])
    with growing.lengths_followed():
        assert (len(items) == 2, len([1])) == (True, 1)
    assert (growing.stands_for(3), growing.stands_for(4)) == (True, False)
    quiet = Trial(3)
    assert quiet.counted(lambda call: call) + 1 is not None
    assert quiet.stands_for(4)


def test_calls_are_tried_that_no_trial_stands_for() -> None:
    found = []
    for trial in trials():
        count = trial.counted(lambda call: call)
        found.append(trial.call)
        taken = count > 4 and count % 100 == 7
    assert taken
    assert found == [3, 5, 7]
    assert [trial.call for trial in trials()] == [3], "without numbers to follow there is nothing to try"
    assert len([hash(trial.counted(lambda call: call)) for trial in trials()]) == 3
