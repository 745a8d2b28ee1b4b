"""The captured Graph is held against the model before it trains: a model that is traced into another one is refused."""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention

import pyrannc
from pyrannc.capture.torch_internals.fakes import FakeTensorMode, TraceMode
from pyrannc.capture.torch_internals.patching import PatchPoint
from pyrannc.errors import RaNNCError
from pyrannc.face import deployed
from pyrannc.proof import made
from pyrannc.proof.left_behind import LeftBehindError, RefusesLeftBehind
from pyrannc.proof.made import Made
from pyrannc.proof.once import differences
from tests.ranks import RankPool

from .equivalence import environment, local_slice

Ranks = Callable[[int], RankPool]
ROWS = (3, 4)
WIDTH = 8


def as_it_is(x: Tensor) -> Tensor:
    return x


def when_traced(x: Tensor) -> Tensor:
    return x + 1e-2 if torch.compiler.is_compiling() else x


def kind_of_tensor(x: Tensor) -> Tensor:
    return x if type(x) is Tensor else 2 * x


def gradient_alone(x: Tensor) -> Tensor:
    return x.detach() + (x - x.detach()) * 0.5 if torch.compiler.is_compiling() else x


def thrice_before(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.3, training=not torch.compiler.is_compiling())


def of_many_rows(x: Tensor) -> Tensor:
    if x.shape[0] < 3:
        raise ValueError("too few")
    return x


def chaotic(x: Tensor) -> Tensor:
    return x + torch.sin(x.detach() * 1e20) * (2 if torch.compiler.is_compiling() else 1)


class Inner(nn.Module):
    def __init__(self, special: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.special = special

    def forward(self, x: Tensor) -> Tensor:
        return self.special(self.dropout(torch.tanh(self.first(x))))


class Net(nn.Module):
    """Dropout, a buffer that is assigned anew, and something special in the middle."""

    def __init__(self, special: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(Inner(as_it_is), Inner(special), Inner(as_it_is), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return functional.mse_loss(self.layers(x), target)


def train(special: Callable[[Tensor], Tensor]) -> str:
    """What report() says of the comparison, or the error."""
    torch.manual_seed(0)
    random.seed(0)
    model = Net(special)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with environment({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}):
        module = pyrannc.RaNNCModule(model, optimizer, check_unused_values=False)
    own = local_slice(ROWS)
    before = random.getstate()
    try:
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.randn(sum(ROWS), WIDTH)[own], torch.randn(sum(ROWS), WIDTH)[own]).backward()
            optimizer.step()
    except RaNNCError as error:
        assert all(param.grad is None for param in model.parameters())
        return str(error)
    assert random.getstate() == before
    assert float(module.state_dict(rank0_only=False)["calls"]) == 3
    compared: str = module.report().compared
    module.undeploy()
    return compared


CASES = {
    as_it_is: "compared with the model on 2 rows of the first batch: equal outputs and gradients",
    when_traced: r"sub-module 'layers.1' \(Inner\) is the first that differs.* leaf_modules=\['layers.1'\]",
    kind_of_tensor: r"sub-module 'layers.1' \(Inner\) is the first that differs",
    gradient_alone: r"'layers.1.first' .*the first that differs.* gradient .*leaf_modules=\['layers.1'\]",
    thrice_before: "not compared with the model: it draws random numbers in another order",
    of_many_rows: "compared with the model on 3 rows of the first batch",
    chaotic: "not compared with the model: rounding alone",
}


@pytest.mark.parametrize("special", CASES, ids=lambda special: special.__name__)
def test_a_model_that_is_traced_otherwise_never_trains(ranks: Ranks, special: Callable[[Tensor], Tensor]) -> None:
    for told in ranks(2).run(train, special):
        assert re.search(CASES[special], told), told


class Keys(nn.Module):
    """Attention whose bias of keys changes nothing: its gradient is roundings alone, and others when it is traced."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x).to(self.kind), self.key(x).to(self.kind)
        traced = torch.compiler.is_compiling()
        scores = torch.matmul(q, k.mT / 3) if traced else torch.matmul(q / 3, k.mT)
        return torch.matmul(scores.to(x.dtype).softmax(-1), self.value(x)).square().mean()


class Scaled(nn.Module):
    """Layers of which little is added, and which get no gradient when they are traced."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        y = y.detach() if torch.compiler.is_compiling() else y
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(x + y * self.scale).float().square().mean()  # type: ignore[no-any-return]


class Turned(nn.Module):
    """Angles that are too large for bfloat16, in a region of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            angles = 1001.0 * torch.arange(1.0, 1.0 + x.shape[1])[:, None] @ torch.linspace(1.0, 2.0, WIDTH)[None]
        return self.last(self.first(x) * angles.cos()).float().square().mean()  # type: ignore[no-any-return]


class Coarse(nn.Module):
    """A part that stays whole has a type of its own; what comes after differs by its roundings when it is traced."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.inner, self.last = _Rounded(kind), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x) * (1 + 1e-6 * torch.compiler.is_compiling())).square().mean()  # type: ignore[no-any-return]


class _Rounded(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0])
        return self.first(x).to(self.kind).to(x.dtype) * rows / rows


def compared(make: Callable[[], nn.Module], dtype: torch.dtype, autocast: bool = False) -> str:
    """What report() says of the comparison, or the error."""
    torch.manual_seed(0)
    model = make().to(dtype)
    module = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1), check_unused_values=False)
    try:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = module(torch.randn(4, 6, WIDTH, dtype=dtype))
            loss.backward()
    except RaNNCError as error:
        return str(error)
    found: str = module.report().compared
    module.undeploy()
    return found


@pytest.mark.parametrize("outer", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_gradient_of_roundings_alone_is_no_difference(ranks: Ranks, kind: torch.dtype, outer: torch.dtype) -> None:
    (told,) = ranks(1).run(compared, partial(Keys, kind), outer)
    assert "equal outputs and gradients" in told, told


def left_behind() -> list[int]:
    """How many parameters are copied for a comparison, and how many copies are there when planning begins, in a region
    of autocast, where torch keeps conversions of what has gradients."""
    model, copies, found = Keys(torch.float32), list[weakref.ref[Tensor]](), list[int]()
    leaf_of, decide = made.FewRows._leaf, deployed.decide

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        copy = leaf_of(*args, **kwargs)
        copies.append(weakref.ref(copy))
        return copy

    def deciding(*args: Any) -> Any:
        found.extend((len(copies), sum(copy() is not None for copy in copies)))
        return decide(*args)

    module = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1), check_unused_values=False)
    looking = patch.object(made.FewRows, "_leaf", noted), patch.object(deployed, "decide", deciding)
    with looking[0], looking[1], torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(4, 6, WIDTH)).backward()
    module.undeploy()
    assert found[0] > 2 * len(list(model.parameters())), "what differs was not computed again"
    return found


def test_a_comparison_leaves_no_copies_of_parameters(ranks: Ranks) -> None:
    (found,) = ranks(1).run(left_behind)
    assert found[1] == 0, found


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3])
def test_a_small_gradient_that_is_none_of_roundings_is_compared(ranks: Ranks, scale: float) -> None:
    (told,) = ranks(1).run(compared, partial(Scaled, scale), torch.float32)
    assert re.search(r"'inner' .*is the first that differs", told), told


def test_types_inside_of_what_stays_whole_have_their_roundings(ranks: Ranks) -> None:
    (told,) = ranks(1).run(compared, partial(Coarse, torch.float32), torch.float64)
    assert "equal outputs and gradients" in told, told
    (told,) = ranks(1).run(compared, partial(Coarse, torch.float64), torch.float64)
    assert "is the first that differs" in told, told


def test_under_autocast_the_graph_computes_as_its_casts_say(ranks: Ranks) -> None:
    (told,) = ranks(1).run(compared, Turned, torch.float32, True)
    assert "equal outputs and gradients" in told, told


class Memory:
    """A helper of a model, that is no module."""

    last: Tensor | None = None


class Remembers(nn.Module):
    """Keeps a tensor in an object, for itself at the next call or for others to see."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.first, self.memory, self.reads = nn.Linear(WIDTH, WIDTH), Memory(), reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.reads and self.memory.last is not None:
            y = y + self.memory.last.mean()
        self.memory.last = y.detach()
        return self.memory.last.mean() * y.square().mean()


def test_tensors_for_the_next_call_are_refused_wherever_they_are(ranks: Ranks) -> None:
    (told,) = ranks(1).run(compared, partial(Remembers, reads=True), torch.float32)
    assert re.search(r"test_once.py:\d+\) reads a tensor that an earlier call .*register_buffer", told), told
    (told,) = ranks(1).run(compared, partial(Remembers, reads=False), torch.float32)
    assert "equal outputs and gradients" in told, told


def test_an_infinite_gradient_hides_no_other() -> None:
    largest = torch.tensor([float("inf"), 1.0])
    made, expected = (Made({}, {}, {"a": largest, "b": torch.tensor([b])}) for b in (0.0, 7.0))
    assert [item.name for item in differences(made, expected) if item.size > 0] == ["b"]


def test_what_torch_traces_for_itself_is_not_left_behind() -> None:
    left, own = TraceMode().from_tensor(torch.ones(3)), FakeTensorMode().from_tensor(torch.ones(3))
    with RefusesLeftBehind():  # type: ignore[no-untyped-call]  # torch has no types for it
        assert (own + 1).device == own.device
        # An error there would end the process.
        assert left.device == own.device
        assert left.layout == own.layout
        with pytest.raises(LeftBehindError):
            left + 1


class Attends(nn.Module):
    """Attention with slopes that are trained, whose gradients torch traces for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slopes = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        def sloped(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - self.slopes[h] * (i - j).abs()

        heads = self.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
        attended = flex_attention.flex_attention(heads, heads, heads, score_mod=sloped)
        assert isinstance(attended, Tensor)
        return attended.square().mean()


def attending() -> str:
    # torch has these gradients on GPUs only, but their formula runs anywhere.
    with PatchPoint(flex_attention, "_validate_device").replaced_by(lambda *_: None):
        return compared(Attends, torch.float32)


def test_gradients_of_operators_that_take_functions(ranks: Ranks) -> None:
    (told,) = ranks(1).run(attending)
    assert "equal outputs and gradients" in told, told
