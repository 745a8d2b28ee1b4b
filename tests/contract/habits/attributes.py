"""What the model keeps in Python between calls: attributes of its modules and their classes, global values, buffers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import Setting
from tests.contract.training import WIDTH, Chain, Returns, learn, learn_around, pairs

BUFFER = "keep it in a buffer (`register_buffer`), changed in place"


class _Scaled(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.options = {"shift": 0.0}
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x) * self.alpha + self.options["shift"])  # type: ignore[no-any-return]


@equal()
def number_changed(job: Job) -> None:
    """A number that the model reads is changed: `net.alpha = 0.5`."""
    net = _Scaled()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "alpha", 0.5))


@equal()
def number_in_dict_changed(job: Job) -> None:
    """A number in a dict of the model is changed: `net.options["shift"] = 1.0`."""
    net = _Scaled()
    learn_around(job, Returns(net, F.mse_loss), lambda model: net.options.update(shift=1.0))


@equal()
def number_of_another_type(job: Job) -> None:
    """A number is changed to an equal one of another type, also in a dict: `net.power = 1.0`, where it was `1`."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.power: float = 1
            self.options: dict[str, Any] = {"shifts": [True]}

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) * (2 if isinstance(self.power, int) else 3)
            shifted: Tensor = y + 1 if self.options["shifts"][0] is True else y
            return shifted

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "power", 1.0))
    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: net.options.update(shifts=[1]))


@equal()
def number_in_own_dict(job: Job) -> None:
    """A forward reads `self.__dict__.get("scale", 1.0)` and `vars(self)`; the script sets attributes later."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x) * self.__dict__.get("scale", 1.0) + vars(self).get("shift", 0.0)
            return y

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "scale", 0.5))
    net = Net()
    net.shift = 0.5  # type: ignore[assignment]  # a module has whatever a script sets
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "shift", 1.0))


class _Settings(dict[str, Any]):
    __getattr__ = dict.__getitem__


@equal()
def dict_with_attributes(job: Job) -> None:
    """A configuration is a dict whose items are its attributes: `__getattr__ = dict.__getitem__`."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.settings = _Settings(scale=1.0)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x) * self.settings.scale
            return y

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: net.settings.update(scale=0.5))


class _Told:
    """What a model is told of one of its parts."""

    shift = 0.0

    def __init__(self) -> None:
        self.scale = 1.0


@equal()
def object_in_list_changed(job: Job) -> None:
    """A number of an object in a list of the model is changed: `net.parts[0].scale = 0.5`."""
    parts = [_Told()]

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.parts[0].scale

    learn_around(job, Returns(Net(), F.mse_loss), lambda model: setattr(parts[0], "scale", 0.5))


@equal()
def number_of_class_changed(job: Job) -> None:
    """A configuration's number stands in its class, and is set for the object later: `config.shift = 1.0`."""
    config = _Told()

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.config.shift

    learn_around(job, Returns(Net(), F.mse_loss), lambda model: setattr(config, "shift", 1.0))


@equal()
def most_steps_so_far(job: Job) -> None:
    """The model keeps the longest sequence of all calls: `self.longest = max(self.longest, x.shape[1])`."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.longest = 2

        def forward(self, x: Tensor) -> Tensor:
            self.longest = max(self.longest, x.shape[1])
            return super().forward(x).mean(1) / self.longest

    _learn_lengths(job, Net())


def _learn_lengths(job: Job, net: nn.Module) -> None:
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(Returns(net, F.mse_loss), optimizer)
    for length, (x, target) in zip((3, 5, 2), job.batches(pairs), strict=True):
        optimizer.zero_grad()
        loss = model(x[:, None].repeat(1, length, 1), target)
        loss.backward()
        job.same("loss", loss)
        optimizer.step()
    job.state(model)


class _Positions(Chain):
    """Weighs steps by a table, which is made anew for a sequence that is longer than all before."""

    longest = 0
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.table = torch.arange(1, self.longest + 1, dtype=x.dtype)
        assert self.table is not None
        return super().forward(x * self.table[: x.shape[1], None]).mean(1)


@refused(
    "CaptureError",
    r'it finds the attribute "longest" of sub-module \'net\' as the first one leaves it, but not "table"',
    instead="make it in `__init__`",
)
def table_of_longest_sequence(job: Job) -> None:
    """The forward keeps a table, and for how many steps it is, and makes it anew for more of them."""
    _learn_lengths(job, _Positions())


@equal()
def table_of_longest_sequence_made_before(job: Job) -> None:
    """The same, and the script calls the model with the longest sequence before it is wrapped."""
    net = _Positions()
    net(torch.ones(1, 5, WIDTH))
    _learn_lengths(job, net)


@equal()
def dropout_changed(job: Job) -> None:
    """The rate of a dropout layer is changed: `dropout.p = 1.0`."""
    net = _Scaled()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net.dropout, "p", 1.0))


SCALE = 1.0


@equal()
def global_changed(job: Job) -> None:
    """A global number that the model's forward reads is changed."""
    global SCALE
    SCALE = 1.0

    def change(model: nn.Module) -> None:
        global SCALE
        SCALE = 0.5

    learn_around(job, Returns(Chain(), lambda y, target: F.mse_loss(y * SCALE, target)), change)


class _Arguments:
    """As a parser of a command line makes them."""

    scale = 1.0


ARGUMENTS = _Arguments()
STEP = 0


@equal()
def argument_changed(job: Job) -> None:
    """An attribute of a global object that the model's forward reads is changed: `args.scale = 0.5`."""
    ARGUMENTS.scale = 1.0

    def forward(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y * ARGUMENTS.scale, target)

    learn_around(job, Returns(Chain(), forward), lambda _: setattr(ARGUMENTS, "scale", 0.5))


class _Slots:
    """Has a private slot alone."""

    __slots__ = ("__scale",)

    def set(self, scale: float) -> None:
        self.__scale = scale

    def of(self, y: Tensor) -> Tensor:
        return y * self.__scale


SLOTS = _Slots()


@equal()
def slots_changed(job: Job) -> None:
    """Numbers in slots that the model reads are changed, of a global object and of one that it has."""
    net = Returns(Chain(), lambda y, target: F.mse_loss(net.slots.of(SLOTS.of(y)), target))
    net.slots = _Slots()
    for scaled in (net.slots, SLOTS):
        scaled.set(1.0)

    def change(_: object) -> None:
        net.slots.set(0.5)
        SLOTS.set(0.25)

    learn_around(job, net, change)


@equal()
def steps_counted(job: Job) -> None:
    """The function that trains counts its steps in a global number."""
    global STEP
    STEP = 0
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)

    def step() -> None:
        global STEP
        STEP += 1
        learn(job, model, optimizer, step=STEP % 2)

    for _ in range(3):
        step()
    job.state(model)


class _Remembers(Chain):
    """A chain that keeps something in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.counted = Counter[str]()
        self.kept: list[Tensor] = []
        self.last: dict[str, Tensor] = {}
        self.bank = torch.zeros(WIDTH)
        self.sizes: dict[str, float] = {}
        self.helper = _Helper()


class _Helper:
    """Keeps what it is given."""

    state: Tensor | None = None

    def __init__(self) -> None:
        self.count = 0


def _remembering(job: Job, keep: Any) -> None:
    class Net(_Remembers):
        def forward(self, x: Tensor) -> Tensor:
            return keep(self, super().forward(x))  # type: ignore[no-any-return]

    learn_around(job, Returns(Net(), F.mse_loss), lambda model: None)


@refused("CaptureError", "calls", instead=BUFFER)
def counter(job: Job) -> None:
    """The model counts its calls in a Python number."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        net.calls += 1
        return y * (1.0 if net.calls < 2 else 0.5)

    _remembering(job, keep)


@refused("CaptureError", "counted", instead=BUFFER)
def counter_of_collections(job: Job) -> None:
    """The model counts in a `collections.Counter`, a `defaultdict`, an `OrderedDict` or a `deque`."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        net.counted["calls"] += 1
        return y / net.counted["calls"]

    _remembering(job, keep)


@refused("CaptureError", "kept", instead="return it as an output of the model")
def list_grows(job: Job) -> None:
    """The model appends to a list of its own."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        net.kept.append(y.detach())
        return y

    _remembering(job, keep)


@refused("CaptureError", "last", instead="return it as an output of the model")
def dict_filled(job: Job) -> None:
    """The model stores a tensor in a dict of its own."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        net.last["y"] = y.detach()
        return y

    _remembering(job, keep)


@refused("CaptureError", "sizes", instead=BUFFER)
def number_kept(job: Job) -> None:
    """The model keeps a number of its first batch in a dict, for all later ones."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        if "mean" not in net.sizes:
            net.sizes["mean"] = y.detach().abs().mean().item()
        return y / net.sizes["mean"]

    _remembering(job, keep)


@refused("CaptureError", "earlier call of the model has left", instead=BUFFER)
def helper_keeps(job: Job) -> None:
    """A helper object of the model keeps a tensor, which the next call reads."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        before, net.helper.state = net.helper.state, y.detach().mean()
        return y if before is None else y + before

    _remembering(job, keep)


@refused("CaptureError", "helper.count", instead=BUFFER)
def helper_counts(job: Job) -> None:
    """A helper object of the model counts the calls, and what is computed depends on the count."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        net.helper.count += 1
        return y / net.helper.count

    _remembering(job, keep)


@equal(note="the count stays as it was, since captured calls do not run the forward")
def helper_counts_for_a_log(job: Job) -> None:
    """A helper object of the model counts the calls, which changes nothing that is computed."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        net.helper.count += 1
        return y

    _remembering(job, keep)


@refused("CaptureError", "bank", instead=BUFFER)
def running_tensor(job: Job) -> None:
    """The model advances a tensor that is a plain attribute: `self.bank = 0.9 * self.bank + ...`."""

    def keep(net: _Remembers, y: Tensor) -> Tensor:
        net.bank = 0.9 * net.bank + net.head.bias.detach()
        return y + net.bank

    _remembering(job, keep)


@refused("CaptureError", 'in the attribute "last"', instead=BUFFER)
def running_tensor_in_a_dict(job: Job) -> None:
    """The same in place, with a tensor in a dict: `self.state["mean"].mul_(0.9).add_(...)`."""

    class Net(_Remembers):
        def __init__(self) -> None:
            super().__init__()
            self.last["mean"] = torch.zeros(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y - self.last["mean"].mul_(0.9).add_(y.detach().mean(0))

    learn_around(job, Returns(Net(), F.mse_loss), lambda model: None)


class _Counting(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) / self.calls


@equal()
def buffer_counts(job: Job) -> None:
    """The model counts its calls in a buffer, changed in place."""
    learn_around(job, Returns(_Counting(), F.mse_loss), lambda model: None)


@equal(settings=(Setting((8, 0, 0), 1, 4), Setting((3, 0, 5), 1, 2)))
def buffer_counts_while_rows_change(job: Job) -> None:
    """The same, and some calls have too few rows for every Replica."""
    net = Returns(_Counting(), F.mse_loss)
    model = job.wrap(net)
    for step, rows in enumerate((8, 8, 24)):
        loss = model(*job.batch(pairs, step, rows))
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)
    job.state(model)


@equal()
def buffer_assigned(job: Job) -> None:
    """The model assigns its buffer anew: `self.bank = 0.9 * self.bank + ...`."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.bank = 0.9 * self.bank + 0.1 * self.head.bias.detach()
            return super().forward(x) + self.bank

    learn_around(job, Returns(Net(), F.mse_loss), lambda model: None)


@equal()
def buffer_set_between_calls(job: Job) -> None:
    """The script changes a buffer in place between calls, as a schedule of a temperature does."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.temperature

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: net.temperature.fill_(2.0))


@equal(note="with a warning: the model is deployed anew")
def buffer_registered_later(job: Job) -> None:
    """A buffer is registered after some steps, where there was none before."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("prior", None)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if self.prior is None else y * self.prior

    net = Net()
    prior = torch.full((WIDTH,), 0.5, dtype=torch.float64)
    learn_around(job, Returns(net, F.mse_loss), lambda model: net.register_buffer("prior", prior))
