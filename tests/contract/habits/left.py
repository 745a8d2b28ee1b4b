"""What the forward leaves for the script, or for its next call, beside its result: in attributes, variables, caches."""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.training import Chain, Returns, learn, learn_around, pairs, sgd

RETURN = "return it from the forward"
SET = "is set by the forward.*return it from the forward instead"


class _Holder:
    """Has a place for a tensor."""

    aux: Any = 0.0

    def __init__(self) -> None:
        self.aux = 0.0
        self.norms: list[Any] = []
        self.last: list[list[Any]] = [[], []]


HOLDER = _Holder()
LAST: Any = 0.0
PENALTIES: list[Any] = []
METRICS: dict[str, Any] = {}
MASKS: dict[int, Tensor] = {}
COUNTS = {"calls": 0, "rows": 0}
COUNTED = np.zeros(2)


class _Leaves(Chain):
    """Leaves something in every call."""

    def __init__(self, leave: Any) -> None:
        super().__init__()
        self.leave = leave
        self.holder = _Holder()
        self.namespace = SimpleNamespace(aux=0.0)
        self.nested: dict[str, list[Any]] = {"norms": []}
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.leave(self, y.pow(2).mean())
        return y


def _leaving(job: Job, leave: Any, read: Any, again: Any = lambda net: None) -> None:
    """Steps whose loss has something added that the forward has left; ``again`` comes before each call."""
    net = _Leaves(leave)
    model = job.wrap(Returns(net, F.mse_loss), sgd(net.parameters()))
    for batch in job.batches(pairs):
        again(net)
        loss = model(*batch)
        job.same("loss", loss)
        (loss + read(net)).backward()


@refused("RaNNCError", SET, instead=RETURN)
def attribute_added_to_loss(job: Job) -> None:
    """The script adds a penalty to the loss that the forward has left in an attribute, reset before each call."""
    _leaving(job, lambda net, aux: setattr(net, "aux", aux), lambda net: net.aux, lambda net: setattr(net, "aux", 0.0))


@refused("RaNNCError", "holder.aux", SET, instead=RETURN)
def helper_added_to_loss(job: Job) -> None:
    """The same in a helper object that the model has."""
    _leaving(job, lambda net, aux: setattr(net.holder, "aux", aux), lambda net: net.holder.aux)


@refused("RaNNCError", "holder.aux", SET, instead=RETURN)
def helper_reset_and_added_to_loss(job: Job) -> None:
    """The same, and the script resets it after each step."""
    net = _Leaves(lambda net, aux: setattr(net.holder, "aux", aux))
    optimizer = sgd(net.parameters())
    model = job.wrap(Returns(net, F.mse_loss), optimizer)
    for step in range(2):
        learn(job, model, optimizer, step=step)
        net.holder.aux = 0.0
    (model(*job.batch(pairs, 2)) + net.holder.aux).backward()


@refused("RaNNCError", "namespace.aux", SET, instead=RETURN)
def namespace_added_to_loss(job: Job) -> None:
    """The same in a `SimpleNamespace`."""
    _leaving(job, lambda net, aux: setattr(net.namespace, "aux", aux), lambda net: net.namespace.aux)


@refused("RaNNCError", "nested", SET, instead=RETURN)
def nested_list_added_to_loss(job: Job) -> None:
    """The same in a list in a dict of the model, which the script empties."""
    _leaving(
        job,
        lambda net, aux: net.nested["norms"].append(aux),
        lambda net: sum(net.nested["norms"]),
        lambda net: net.nested["norms"].clear(),
    )


@refused("RaNNCError", "holder.last", SET, instead=RETURN)
def last_ones_added_to_loss(job: Job) -> None:
    """The forward appends a penalty to a list in a helper object's list, and puts the last four in its place."""

    def leave(net: _Leaves, aux: Tensor) -> None:
        net.holder.last[0].append(aux)
        net.holder.last[0] = net.holder.last[0][-4:]

    _leaving(job, leave, lambda net: net.holder.last[0][-1])


@refused("RaNNCError", "class _Holder", SET, instead=RETURN)
def class_added_to_loss(job: Job) -> None:
    """The same in an attribute of a class."""
    _leaving(job, lambda _, aux: setattr(_Holder, "aux", aux), lambda _: _Holder.aux)


@refused("RaNNCError", "HOLDER.aux", SET, instead=RETURN)
def global_object_added_to_loss(job: Job) -> None:
    """The same in an attribute of an object in a global variable."""
    _leaving(job, lambda _, aux: setattr(HOLDER, "aux", aux), lambda _: HOLDER.aux)


@refused("RaNNCError", '"LAST"', SET, instead=RETURN)
def global_added_to_loss(job: Job) -> None:
    """The same in a global variable."""

    def leave(_: nn.Module, aux: Tensor) -> None:
        global LAST
        LAST = aux

    _leaving(job, leave, lambda _: LAST)


@refused("RaNNCError", "variable", SET, instead=RETURN)
def outer_variable_added_to_loss(job: Job) -> None:
    """The same in a variable of the function round the model (`nonlocal`)."""
    last: Any = 0.0

    def leave(_: nn.Module, aux: Tensor) -> None:
        nonlocal last
        last = aux

    _leaving(job, leave, lambda _: last)


@refused("RaNNCError", "PENALTIES", SET, instead=RETURN)
def global_list_added_to_loss(job: Job) -> None:
    """The same in a global list, which the script empties before each call."""
    _leaving(
        job, lambda _, aux: PENALTIES.append(aux), lambda _: torch.stack(PENALTIES).sum(), lambda _: PENALTIES.clear()
    )


@refused("RaNNCError", "METRICS", SET, instead=RETURN)
def metric_read(job: Job) -> None:
    """The forward notes a norm in a global dict, and the script reads it: `METRICS["norm"].item()`."""
    _leaving(job, lambda _, aux: METRICS.update(norm=aux.detach()), lambda _: METRICS["norm"].item())


@equal()
def metrics_noted(job: Job) -> None:
    """The forward notes norms in a global dict and a deque, which nobody reads; the script clears or resets them."""
    METRICS.clear()
    window: deque[Any] = deque(maxlen=2)

    def leave(net: _Leaves, aux: Tensor) -> None:
        METRICS["norm"] = aux.detach()
        METRICS.setdefault("all", {})[type(net).__name__] = aux
        window.append(aux.detach())

    net = _Leaves(leave)
    optimizer = sgd(net.parameters())
    model = job.wrap(Returns(net, F.mse_loss), optimizer)
    for step in range(4):
        learn(job, model, optimizer, step=step)
        if step == 1:
            METRICS.clear()
        METRICS["norm"] = 0.0
    job.state(model)


@equal()
def list_cleared_and_summed(job: Job) -> None:
    """The forward clears a global list, fills it, and adds its sum to the loss."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            PENALTIES.clear()
            for layer in self.layers:
                x = torch.tanh(layer(x))
                PENALTIES.append(x.pow(2).mean())
            return self.head(x)  # type: ignore[no-any-return]

    net = Net()
    learn_around(job, Returns(net, lambda y, target: F.mse_loss(y, target) + sum(PENALTIES)), lambda model: None)


@equal()
def list_summed_and_cleared(job: Job) -> None:
    """The forward fills a list of a helper object, adds its sum to the loss, and clears it."""

    def leave(net: _Leaves, aux: Tensor) -> None:
        net.holder.norms.append(aux)

    def result(y: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = F.mse_loss(y, target) + sum(net.holder.norms)
        net.holder.norms.clear()
        return loss

    net = _Leaves(leave)
    learn_around(job, Returns(net, result), lambda model: None)


@equal()
def masks_cached(job: Job) -> None:
    """The forward keeps tensors that sizes decide, on demand: in a global dict, a helper object, an `lru_cache`."""
    MASKS.clear()
    holder = _Holder()
    holder.aux = None

    @functools.lru_cache
    def ramp(width: int) -> Tensor:
        return torch.arange(width) / width

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            width = y.shape[1]
            if width not in MASKS:
                MASKS[width] = torch.arange(width)
            if holder.aux is None:
                holder.aux = torch.ones(width)
            return y * MASKS[width] + holder.aux * ramp(width)

    learn_around(job, Returns(Net(), F.mse_loss), lambda model: None)


@equal(note="the counts stay as they were, since captured calls do not run the forward")
def counts_for_a_log(job: Job) -> None:
    """The forward counts calls and rows in a global dict, which changes nothing that is computed."""

    def leave(_: nn.Module, aux: Tensor) -> None:
        COUNTS["calls"] += 1

    net = _Leaves(leave)

    def result(y: Tensor, target: Tensor) -> Tensor:
        COUNTS["rows"] += len(y)
        return F.mse_loss(y, target)

    learn_around(job, Returns(net, result), lambda model: None)


@refused("CaptureError", r"counts from call to call.*COUNTS\['calls'\]", instead="keep it in a buffer")
def global_counter(job: Job) -> None:
    """The forward counts its calls in a global dict, and what is computed depends on the count."""

    def result(y: Tensor, target: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return F.mse_loss(y / COUNTS["calls"], target)

    learn_around(job, Returns(Chain(), result), lambda model: None)


@equal(note="the list stays as it was, since captured calls do not run the forward")
def numbers_appended_for_a_log(job: Job) -> None:
    """The forward appends a number to a list of a helper object at each call, which nobody reads."""
    net = _Leaves(lambda net, aux: net.holder.norms.append(0.5))
    learn_around(job, Returns(net, F.mse_loss), lambda model: None)


def _warmed_up(job: Job, calls: Callable[[], int]) -> None:
    """The loss has another factor after so many calls."""
    net = Returns(Chain(), lambda y, target: F.mse_loss(y / (1 if calls() < 4 else 2), target))
    learn_around(job, net, lambda model: None)


@refused("CaptureError", "counts from call to call.*holder.count", instead="keep it in a buffer")
def counter_of_a_warm_up(job: Job) -> None:
    """The forward counts its calls in a helper object, and goes another way only after many of them."""
    holder = SimpleNamespace(count=0)

    def calls() -> int:
        holder.count += 1
        return holder.count

    _warmed_up(job, calls)


@refused("CaptureError", "counts from call to call.*holder.count", instead="keep it in a buffer")
def counter_with_a_period(job: Job) -> None:
    """The forward counts its calls in a helper object, and goes another way in some of them: `count % 4 == 3`."""
    holder = SimpleNamespace(count=0)

    def calls() -> int:
        holder.count += 1
        return 4 if holder.count % 4 == 3 else 1

    _warmed_up(job, calls)


@equal(note="nothing is logged by captured calls, which do not run the forward")
def log_with_a_period(job: Job) -> None:
    """The forward counts its calls in a helper object, and writes a log in some of them."""
    holder = SimpleNamespace(count=0, told=0)

    def calls() -> int:
        holder.count += 1
        if holder.count % 4 == 3:
            holder.told += 1
        return 1

    _warmed_up(job, calls)


@refused("CaptureError", r"counts from call to call.*COUNTED\[0\]", instead="keep it in a buffer")
def counter_in_an_array(job: Job) -> None:
    """The same after many calls that are counted in an array of NumPy."""
    COUNTED[0] = 0

    def calls() -> int:
        COUNTED[0] += 1
        return int(COUNTED[0])

    _warmed_up(job, calls)


@refused("CaptureError", "counts from call to call.*__defaults__", instead="keep it in a buffer")
def default_argument_that_grows(job: Job) -> None:
    """The forward appends to a list that is a default argument (`seen=[]`), and goes another way once it is long."""

    def calls(seen: list[int] = []) -> int:  # noqa: B006  # this is the case
        seen.append(1)
        return len(seen)

    _warmed_up(job, calls)


@refused("CaptureError", 'takes what comes next from an iterator.*"ids"', instead="pass it as an argument")
def next_of_an_iterator(job: Job) -> None:
    """The forward takes what comes next from an iterator or a generator that the model has: `next(self.ids)`."""
    ids = itertools.count()
    _warmed_up(job, lambda: next(ids))


@refused("CaptureError", 'takes what comes next from an iterator.*"ways"', instead="pass it as an argument")
def next_of_a_cycle(job: Job) -> None:
    """The same of `itertools.cycle`, which has been round before the first call."""
    ways = itertools.cycle([1, 1, 1, 4])
    for _ in range(5):
        next(ways)
    _warmed_up(job, lambda: next(ways))


@equal()
def vocabulary_beside_the_model(job: Job) -> None:
    """The model has a helper object with a vocabulary of 50,000 words, which the forward looks into."""
    words = [f"word {number}" for number in range(50_000)]
    tokenizer = SimpleNamespace(numbers={word: number for number, word in enumerate(words)}, words=tuple(words))

    def result(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y * tokenizer.numbers["word 2"], target) / len(tokenizer.words)

    learn_around(job, Returns(Chain(), result), lambda model: None)


@warned("looked after.*entries", instead="what is changed in more than 4,096 is not seen: pass it as an argument")
def many_objects_beside_the_model(job: Job) -> None:
    """The same with an object for each word."""
    entries = [SimpleNamespace(word=f"word {number}", weight=2.0) for number in range(50_000)]
    net = Returns(Chain(), lambda y, target: F.mse_loss(y * entries[2].weight, target))
    learn_around(job, net, lambda model: None)


@equal()
def proxy_of_what_is_no_more(job: Job) -> None:
    """The model has a `weakref.proxy` of its trainer, which is no more, in an attribute and in a helper object."""
    trainer, net = _Holder(), _Leaves(lambda net, aux: net.holder.aux)
    net.aux = net.holder.aux = weakref.proxy(trainer)
    del trainer
    learn_around(job, Returns(net, F.mse_loss), lambda model: None)


@equal()
def trainer_by_a_proxy(job: Job) -> None:
    """The model reads a setting of its trainer by a `weakref.proxy` or a `weakref.ref`, which the script changes."""
    trainer, net = _Holder(), _Leaves(lambda net, aux: None)
    trainer.aux, net.aux, net.holder.aux = 1.0, weakref.proxy(trainer), weakref.ref(trainer)

    def result(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y * net.aux.aux + net.holder.aux().aux, target)

    def change(_: nn.Module) -> None:
        trainer.aux = 0.5

    learn_around(job, Returns(net, result), change)


@refused("CaptureError", "earlier call of the model has left.*METRICS", instead="keep it in a buffer")
def running_mean_in_a_global(job: Job) -> None:
    """The forward advances a mean in a global dict: `METRICS["mean"] = 0.9 * METRICS.get("mean", 0.0) + ...`."""
    METRICS.clear()

    def leave(_: nn.Module, aux: Tensor) -> None:
        METRICS["mean"] = 0.9 * METRICS.get("mean", 0.0) + 0.1 * aux.detach()

    def result(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y / (1 + METRICS["mean"]), target)

    learn_around(job, Returns(_Leaves(leave), result), lambda model: None)


@refused("CaptureError", "earlier call of the model has left.*holder.aux", instead="keep it in a buffer")
def counter_in_a_tensor(job: Job) -> None:
    """A helper object counts calls in a tensor that it makes at the first one, and the result depends on it."""

    def result(y: Tensor, target: Tensor) -> Tensor:
        before = net.holder.aux
        net.holder.aux = torch.ones(()) if before is None else before + torch.ones(())
        return F.mse_loss(y / net.holder.aux, target)

    net = _Leaves(lambda net, aux: None)
    net.holder.aux = None
    learn_around(job, Returns(net, result), lambda model: None)


class _Modes:
    """What a forward notes of its last training call."""

    last = ""
    level = 0


MODES = _Modes()
READY = False
_DONE = "SET_UP_BY_A_FORWARD"


def _set_up() -> None:
    """What cannot be done twice."""
    global READY  # as scripts do it
    if not READY:
        READY = True
        if _DONE in os.environ:
            raise ValueError("it is set up already")
        os.environ[_DONE] = "1"


@equal()
def constants_left_for_evaluation(job: Job) -> None:
    """Training leaves constants in an object, by which evaluation goes."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            if self.training:
                MODES.last, MODES.level = "train", 3
                return y
            return y * MODES.level if MODES.last == "train" else y

    MODES.last, MODES.level = "", 0
    net = Returns(Net(), F.mse_loss)
    learn_around(job, net, lambda model: job.same("evaluated", _evaluated(model, job)))


def _evaluated(model: Any, job: Job) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(*job.batch(pairs))
    model.train()
    return found


@equal()
def set_up_once(job: Job) -> None:
    """A forward sets something up that cannot be set up twice, and notes that in a global variable."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            _set_up()
            y: Tensor = super().forward(x)
            return y

    global READY  # as above
    READY = False
    os.environ.pop(_DONE, None)
    learn_around(job, Returns(Net(), F.mse_loss), lambda model: _evaluated(model, job))
