"""Ops that treat each row by itself together: experts that sort the rows of a batch and put them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.capture.tracing import traced
from torch import Tensor, nn

from pyrannc._native import Graph
from pyrannc.call.alike import capture_alike
from pyrannc.call.mixing_parts import DividedCapture, without_mixing
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import Captured, CaptureError, CaptureOptions, Sample, capture
from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.nodes.one_call import as_one_call
from pyrannc.capture.options import NO_OPTIONS
from pyrannc.capture.rows import trial
from pyrannc.capture.rows.trial import rows_shown
from pyrannc.capture.torch_internals.levels import functorch_is_active
from pyrannc.capture.torch_internals.tracing import compiling_state
from pyrannc.core.tail import DividedFacts

CPU = torch.device("cpu")
ROWS, TOKENS, WIDTH, EXPERTS = 4, 3, 6, 3


class Experts(nn.Module):
    """Sorts tokens by expert, computes each with that expert's weights, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        shares, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        made = torch.einsum("ti,tio->to", tokens[order], self.weights[chosen[order]])
        return (made[back] * shares[:, None]).view_as(x)


class Unsorted(Experts):
    """Forgets to put tokens back."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum((1, 2)).argsort()]


class Centred(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean(0)


class Shared(Experts):
    """With an activation that the model too has a name for."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        order = tokens.sum(-1).argsort()
        return self.act(tokens[order])[order.argsort()].view_as(x)  # type: ignore[no-any-return]


class Capacity(Experts):
    """Drops the tokens of an expert beyond the thirty-second."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.router(x).argmax(-1).reshape(-1), EXPERTS)
        kept = (chosen.cumsum(0) * chosen).sum(-1) <= 32
        return super().forward(x) * kept.view(-1, TOKENS, 1)


class SortingTwice(nn.Module):
    """Sorts, beside what its inner module does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Experts()

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        order = made.sum((1, 2)).argsort()
        return made[order].relu()[order.argsort()]  # type: ignore[no-any-return]


class LargeCapacity(Experts):
    """Drops the rows beyond the hundredth."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.ones(x.shape[0]).cumsum(0) <= 100).view(-1, 1, 1)


class Seen(Experts):
    """Beside the tokens, others see something without rows."""

    def forward(self, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        raise NotImplementedError


class Counting(Seen):
    def forward(self, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        self.seen = F.one_hot(self.router(x).argmax(-1), EXPERTS).sum((0, 1))
        return Experts.forward(self, x), None


class Balanced(Seen):
    def forward(self, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return Experts.forward(self, x), self.router(x).softmax(-1).mean((0, 1)).square()


class Filling(Seen):
    def forward(self, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        shares, seen = self.router(x).softmax(-1), torch.zeros(EXPERTS)
        for expert in range(EXPERTS):
            seen[expert] = shares[..., expert].mean()
        return Experts.forward(self, x), seen


class FillingOthers(Seen):
    def forward(self, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        others[:1].add_(self.router(x).mean())
        return Experts.forward(self, x), None


class Keeping(Seen):
    """In a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.load: Tensor

    def forward(self, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        new = torch.zeros(EXPERTS)
        new[:] = F.one_hot(self.router(x).argmax(-1), EXPERTS).sum((0, 1))
        self.load = self.load * 0.5 + new.detach()
        return Experts.forward(self, x), None


class Seeing(nn.Module):
    """Reads what others see."""

    def __init__(self, inner: Seen) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        others = torch.zeros(EXPERTS)
        y, beside = self.inner(x, others)
        beside = getattr(self.inner, "seen", beside)
        return y * (1 + others.sum() + (0 if beside is None else beside.sum()))  # type: ignore[no-any-return]


class Asking(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool((x > -1e9).all()) else -x)


class ByNumPy(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.from_numpy(np.cos(x.detach().numpy())))


class Dropping(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class OfOtherRows(nn.Module):
    """Takes what belongs to other rows."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x * places.flip(0).unsqueeze(-1)


class Placing(nn.Module):
    """Gives an inner module a number for each token."""

    def __init__(self, places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.places, self.inner = places, OfOtherRows()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.places(x))  # type: ignore[no-any-return]


def alike(x: Tensor) -> Tensor:
    return torch.arange(TOKENS).repeat(x.shape[0], 1)


def numbered(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]).unsqueeze(1).expand(-1, TOKENS)


def drawn(x: Tensor) -> Tensor:
    return torch.rand(x.shape[0], TOKENS)


def changed(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], TOKENS).add_(x[..., 0].detach())


def of_rows(x: Tensor) -> Tensor:
    return x[..., 0]


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList([inner])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner[0](self.first(x)))  # type: ignore[no-any-return]


def call(rows: int) -> Any:
    return (torch.randn(rows, TOKENS, WIDTH),), {}


def captured(inner: nn.Module, *, told: Sequence[str] = (), tried: Sequence[str] = ()) -> Captured:
    args, kwargs = call(ROWS)
    options = CaptureOptions(row_wise_modules=tuple(told))
    return capture(Net(inner), args, kwargs, device=CPU, rows=ROWS, options=options, tried_together=tried)


def tail_of(found: Captured) -> DividedFacts:
    return DividedFacts.from_json(Graph.from_json(found.graph_json).divide_tail("batch").to_json())


def groups_of(found: Captured) -> set[int]:
    return {op["row_group"] for op in json.loads(found.graph_json)["ops"] if "row_group" in op}


def test_without_a_word_what_sorts_is_in_the_tail() -> None:
    assert tail_of(captured(Experts())).tail.mixing


@pytest.mark.parametrize("name", ["inner.0", "inner.*"])
def test_what_is_told_is_a_group_of_ops(name: str) -> None:
    found = captured(Experts(), told=[name])
    assert groups_of(found) == {0}
    assert not tail_of(found).tail.ops
    assert not any(op.get("opaque") for op in json.loads(found.graph_json)["ops"])


def test_a_group_equals_the_model(assert_equals_model: Callable[..., Captured]) -> None:
    assert_equals_model(Net(Experts()), call, options=CaptureOptions(row_wise_modules=("inner.0",)))


def test_trials_show_a_group() -> None:
    found = captured(Experts(), tried=["inner.0"])
    assert (found.row_wise, groups_of(found)) == ((True,), {0})
    assert not tail_of(found).tail.ops


class Starting(nn.Module):
    """Sets itself up by its first batch."""

    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean()
        return x - self.mean


class StartingFirst(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.first = Starting()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def test_trials_of_a_group_leave_attributes_as_they_were() -> None:
    args, kwargs = call(ROWS)
    net, options = Net(StartingFirst()), CaptureOptions(leaf_modules=("inner.0.first",))
    found = capture(net, args, kwargs, device=CPU, rows=ROWS, options=options, tried_together=["inner.0"])
    assert found.row_wise
    assert net.get_submodule("inner.0.first").mean is None


@pytest.mark.parametrize("kind", [Unsorted, Centred, Dropping, Capacity])
def test_trials_find_what_is_none(kind: type[nn.Module]) -> None:
    found = captured(kind(), tried=["inner.0"])
    assert found.row_wise == (False,)
    assert not groups_of(found)


def test_what_is_made_of_the_number_of_rows_is_what_the_model_makes() -> None:
    found = captured(Placing(alike), tried=["inner.0.inner"])
    assert (found.row_wise, groups_of(found)) == ((True,), {0})
    assert not tail_of(found).tail.ops


def summed_by_segment(x: Tensor, chosen: Tensor, count: Tensor) -> Tensor:
    """Puts the segments of all rows into one dimension, which takes the number of rows."""
    rows, segments = int(x.shape[0]), int(count)
    places = (torch.arange(rows) * segments).unsqueeze(1) + chosen
    sums = torch.zeros(rows * segments, WIDTH).index_add(0, places.flatten(), x.reshape(-1, WIDTH))
    return sums.view(rows, segments, WIDTH)


class Segments(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = torch.as_tensor(2) * torch.as_tensor(EXPERTS)
        return summed_by_segment(x, (x.sum(-1) > 0).long(), count)


def test_what_constants_alone_make_stays_as_it_is_in_trials() -> None:
    found = captured(Segments())
    assert [kept.paths for kept in found.kept_whole] == [(f"{__name__}::summed_by_segment",)]
    assert found.row_wise == (True,)
    assert not tail_of(found).tail.ops


@pytest.mark.parametrize("places", [numbered, drawn, changed, of_rows])
def test_what_differs_from_row_to_row_is_drawn(places: Callable[[Tensor], Tensor]) -> None:
    found = captured(Placing(places), tried=["inner.0.inner"])
    assert not groups_of(found)
    assert tail_of(found).tail.mixing


@pytest.mark.parametrize("kind", [Counting, Balanced, Filling, FillingOthers, Keeping])
def test_what_others_see_without_rows_is_of_no_group(kind: type[Seen]) -> None:
    found = captured(Seeing(kind()), tried=["inner.0.inner"])
    assert not groups_of(found)
    assert tail_of(found).tail.mixing


@pytest.mark.parametrize("kind", [Balanced, Filling, FillingOthers, Keeping])
def test_what_is_told_and_no_group_stays_whole(kind: type[Seen]) -> None:
    try:
        found = captured(Seeing(kind()), told=["inner.0.inner"])
    except CaptureError:
        return
    assert found.leaves
    assert tail_of(found).tail.mixing


def test_who_reads_tensors_that_a_whole_part_leaves_in_attributes_stays_whole_with_it() -> None:
    found = captured(Seeing(Counting()), told=["inner.0.inner"])
    assert "inner.0" in found.leaves
    (kept,) = found.kept_whole
    assert "'inner.0.inner', which stays whole, has left in attribute 'seen'" in kept.cause


def test_an_op_that_another_module_has_named_belongs_to_the_call() -> None:
    act = nn.GELU()
    net = Net(Shared(act))
    # The first of its names is the model's.
    net._modules = {"act": act, **net._modules}
    args, kwargs = call(ROWS)
    options = CaptureOptions(row_wise_modules=("inner.0",))
    found = capture(net, args, kwargs, device=CPU, rows=ROWS, options=options)
    assert (groups_of(found), tail_of(found).tail.ops) == ({0}, ())


@pytest.mark.parametrize("kind", [Asking, ByNumPy])
def test_what_cannot_be_captured_for_all_batches_stays_whole(kind: type[nn.Module]) -> None:
    found = captured(kind(), told=["inner.0"])
    assert found.leaves == ("inner.0",)
    assert [op["row_wise"] for op in json.loads(found.graph_json)["ops"] if op.get("opaque")] == [True]
    assert not found.assumptions


class Mixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mixes: bool) -> Tensor:
        return x - x.mean(0) if mixes else x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class MayMix(Experts):
    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Mixes.apply(x, self.mixes))  # type: ignore[no-untyped-call]  # torch has no types for it


def test_groups_with_calls_of_one_name_are_tried_each() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), MayMix(mixes=False), MayMix(mixes=True))
    args, kwargs = call(ROWS)
    found = capture(net, args, kwargs, device=CPU, rows=ROWS, tried_together=["1", "2"])
    assert found.grouped == ("1", "2")
    assert found.row_wise[:2] == (True, False)


@pytest.mark.parametrize(("others", "row_wise"), [(0, True), (124, False)])
def test_as_many_rows_are_tried_as_all_ranks_have(others: int, row_wise: bool) -> None:
    args, kwargs = call(ROWS)
    batch = BatchRows((ROWS, others), gathered=True)
    sample = Sample(Net(LargeCapacity()), args, kwargs, CPU, ROWS, (1,))
    found, _ = capture_alike(sample, NO_OPTIONS, batch, tried_together=["inner.0"])
    assert found.row_wise == (row_wise,)


def test_it_is_known_with_how_many_rows_a_group_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert captured(Experts(), tried=["inner.0"]).shown_rows == ROWS
    monkeypatch.setattr(trial, "MOST_BYTES", 2000)
    args, kwargs = call(ROWS)
    found = capture(Net(Experts()), args, kwargs, device=CPU, rows=ROWS, all_rows=2000, tried_together=["inner.0"])
    assert found.row_wise == (True,)
    assert ROWS < found.shown_rows < 2000


def tried_on(inner: nn.Module) -> tuple[DividedCapture, list[Sequence[str]]]:
    """A model with much round ``inner``, and the sub-modules that were tried as groups, time after time."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)]

    net = nn.Sequential(*layers(), inner, *layers())
    args, kwargs = call(ROWS)
    asked: list[Sequence[str]] = []

    def divided(together: Sequence[str] = ()) -> DividedCapture:
        asked.append(together)
        found = capture(net, args, kwargs, device=CPU, rows=ROWS, tried_together=together)
        graph = Graph.from_json(found.graph_json)
        native = graph.divide_tail("batch")
        return DividedCapture(found, graph, native, DividedFacts.from_json(native.to_json()))

    return without_mixing(net, divided(), divided), asked


def test_an_outer_group_takes_the_place_of_an_inner_one() -> None:
    found, asked = tried_on(SortingTwice())
    assert asked[:2] == [(), ["2.inner"]]
    assert [part.paths for part in found.captured.tested_together] == [("2",)]
    assert not found.divided.tail.ops


class Router(nn.Module):
    """Gives the tokens by expert, and how many each has as plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, EXPERTS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[int]]:
        chosen = self.linear(tokens).argmax(-1)
        return chosen.argsort(), F.one_hot(chosen, EXPERTS).sum(0).tolist()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        order, sizes = self.router(tokens)
        parts = tokens[order].split(sizes)
        made = torch.cat([part @ weight for part, weight in zip(parts, self.weights, strict=True)])
        return torch.zeros_like(tokens).index_add(0, order, made).view_as(x)


def test_a_group_is_tried_that_can_hold_all_of_what_mixes_rows() -> None:
    found, asked = tried_on(Routed())
    assert asked == [(), ["2"]]
    assert not found.divided.tail.ops


def test_fewer_groups_on_another_rank_are_fewer_here() -> None:
    found = captured(Experts(), tried=["inner.0"])
    assert not groups_of(found.with_row_wise([False]))
    assert groups_of(found.with_row_wise([True])) == {0}


def test_the_same_is_found_again() -> None:
    torch.manual_seed(0)
    net, (args, kwargs) = Net(Experts()), call(ROWS)
    first = capture(net, args, kwargs, device=CPU, rows=ROWS, options=CaptureOptions(row_wise_modules=("inner.*",)))
    again = capture(
        net, args, kwargs, device=CPU, rows=ROWS, options=CaptureOptions(first.leaves), row_wise=first.row_wise,
        tried_together=first.together,
    )  # fmt: skip
    assert again.graph_json == first.graph_json


@pytest.mark.parametrize("option", ["leaf_modules", "row_wise_modules"])
@pytest.mark.parametrize("name", ["innr.*", "missing"])
def test_a_name_that_fits_nothing_is_refused(option: str, name: str) -> None:
    args, kwargs = call(ROWS)
    with pytest.raises(CaptureError, match=rf"{option}: the model has no sub-module '{name}'".replace("*", r"\*")):
        capture(Net(Experts()), args, kwargs, device=CPU, rows=ROWS, options=CaptureOptions(**{option: (name,)}))


class ByNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("option", ["leaf_modules", "row_wise_modules"])
@pytest.mark.parametrize("name", ["layers", "*layers"])
def test_what_nothing_calls_is_refused(option: str, name: str) -> None:
    own = CaptureOptions(**{option: (name,)})
    with pytest.raises(CaptureError, match=rf"{option}.*is a ModuleList, which has no forward.*layers\.\*'"):
        capture(ByNumber(), (torch.ones(ROWS, WIDTH),), {}, device=CPU, rows=ROWS, options=own)


def test_trials_compute_with_all_digits() -> None:
    seen: set[str] = set()

    def call(x: Tensor) -> Tensor:
        seen.add(torch.backends.cuda.matmul.fp32_precision)
        return x

    torch.set_float32_matmul_precision("high")
    try:
        assert tried(call)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert seen == {"ieee"}


def tried(call: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> bool:
    drawn = torch.empty(2, 3, dtype=dtype, device="meta"), [Dim(1, 0), Dim(0, 3)], False
    return rows_shown(call, [drawn], CPU, ROWS) > 0


FAILING: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[torch.full((len(x),), 1000)],
    "gather": lambda x: x.gather(1, torch.full((len(x), 1), 3)),
    "embedding": lambda x: F.embedding(torch.full((len(x),), 3), torch.ones(2, 2)),
    "one hot": lambda x: x * F.one_hot(torch.full((len(x),), 3), 3),
    "cross entropy": lambda x: F.nll_loss(x, torch.full((len(x),), 3), reduction="none"),
    "binary": lambda x: F.binary_cross_entropy(x + 2, x.detach().sigmoid(), reduction="none"),
    "multinomial": lambda x: (x - x.abs() - 1).multinomial(1),
    "bernoulli": lambda x: (x.abs() + 2).bernoulli(),
}


@pytest.mark.parametrize("name", [*FAILING, "no kernel"])
def test_what_would_end_a_gpu_is_not_tried_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(x: Tensor) -> Tensor:
        raise NotImplementedError("Could not run this on the host")

    places, original = [], trial._holds

    def holds(call: Any, operands: Any, device: torch.device, *others: Any) -> int:
        places.append(device.type)
        return original(call, operands, device, *others) if device.type == "cpu" else 0

    monkeypatch.setattr(trial, "_holds", holds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = torch.empty(2, 3, device="meta"), [Dim(1, 0), Dim(0, 3)], False
    assert not rows_shown(FAILING.get(name, no_kernel), [rows], torch.device("cuda"), ROWS)
    assert places == ["cpu", "cuda"][: 1 + (name == "no kernel")]


def test_what_is_small_is_tried_as_what_is_large() -> None:
    assert tried(lambda x: 1e-6 * x)
    assert not tried(lambda x: 1e-6 * (x - x.mean(0)))


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x: x - 0.05 * x.mean(0), HALF),
        (lambda x: x - 0.05 * x.mean(0) + 0 * x.to(HALF), torch.float32),
        (lambda x: (x.to(HALF) - 0.05 * x.to(HALF).mean(0)).float(), torch.float32),
    ],
)
def test_what_mixes_a_little_is_no_rounding_of_half_precision(
    call: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    assert not tried(call, dtype)


def test_roundings_of_half_precision_are_allowed() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF):
            return layer(x)  # type: ignore[no-any-return]

    def shown(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
        rows = torch.empty(2, TOKENS, WIDTH, dtype=dtype, device="meta")
        return rows_shown(call, [(rows, [Dim(1, 0), Dim(0, TOKENS), Dim(0, WIDTH)], False)], CPU, ROWS) > 0

    assert shown(autocast, torch.float32)
    assert shown(lambda x: layer.to(HALF)(x), HALF)
    experts = Experts()
    assert shown(lambda x: experts(x.float()).to(HALF), HALF)


def test_trials_allow_the_roundings_of_what_is_computed_inside() -> None:
    weight = torch.randn(3, 3)
    assert tried(lambda x: ((x.float() @ weight).cumsum(1) * 3).double(), torch.float64)
    assert not tried(lambda x: (x.float() - 1e-2 * x.float().mean(0)).double(), torch.float64)


def test_an_error_in_a_group_leaves_no_region_open() -> None:
    def failing(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("simulated")

    with compiling_state():
        nodes = list(traced(torch.vmap(torch.tanh), torch.randn(3, 2)).graph.nodes)
    group = [node for node in nodes if node.op == "call_function" and node.target is not torch.ops.aten.sym_size.int]
    taken = list(dict.fromkeys(item for node in group for item in node.all_input_nodes if item not in group))
    (tanh,) = (node for node in group if node.target is torch.ops.aten.tanh.default)
    tanh.target = failing
    call = as_one_call(group, taken, [group[-2]], CPU, "row_group")
    with pytest.raises(torch.OutOfMemoryError):
        call(*(torch.randn(3, 2) if node.op == "placeholder" else 3 for node in taken))
    assert not functorch_is_active()
