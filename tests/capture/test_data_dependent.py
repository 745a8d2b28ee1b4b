"""Extents and numbers that depend on data: what stays together, and what is found when shapes change."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyrannc._native import Graph
from pyrannc.capture import Captured, CaptureOptions, Sample, capture
from pyrannc.capture.rows.trial import within
from pyrannc.capture.trace.tracer import Trace, trace
from pyrannc.capture.user.source import Part
from pyrannc.errors import CaptureError

CPU, ROWS, WIDTH = torch.device("cpu"), 4, 3


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, torch.tanh(self.first(x)))


def masked_loss(net: Net, x: Tensor) -> Tensor:
    chosen = x > 0
    return F.mse_loss(net.last(x)[chosen], x[chosen])


def written_by_index(net: Net, x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    before = made + 1
    (rows,) = torch.where(x[:, 0] > 0)
    made.index_add_(0, rows, net.last(x[rows]))
    return (made * before).sum(1)


def scaled_by_a_number(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().max().item()
    return net.last(x / scale) + x.sum(1, keepdim=True)


def two_apart(net: Net, x: Tensor) -> Tensor:
    first = x[x > 0].sum()
    return net.last(x * first)[x < first].sum()


def in_an_autocast_block(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        counted = net.last(x)[x > 0].sum()
    return counted * x


def written_through_a_view(net: Net, x: Tensor) -> Tensor:
    made = net.last(x).clone()
    flat = made.view(-1)
    flat[flat > 0] *= 2
    return made.sum(1)


def repeated_to_a_size(net: Net, x: Tensor) -> Tensor:
    made = net.last(x).repeat_interleave(2, dim=0, output_size=x.shape[0] * 2)
    return made.view(x.shape[0], -1).sum(1)


def captured(function: Callable[..., Any]) -> tuple[Net, Tensor, Captured]:
    torch.manual_seed(0)
    net, x = Net(function).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    return net, x, capture(net, (x,), {}, device=CPU, rows=ROWS)


def opaque(found: Captured) -> list[dict[str, Any]]:
    return [op for op in json.loads(found.graph_json)["ops"] if op.get("opaque")]


@pytest.mark.parametrize(
    ("function", "groups"),
    [
        (masked_loss, 1),
        (written_by_index, 1),
        (scaled_by_a_number, 1),
        (two_apart, 2),
        (in_an_autocast_block, 1),
        (written_through_a_view, 1),
        (repeated_to_a_size, 0),
    ],
)
@pytest.mark.parametrize("rows", [ROWS, 7])
def test_runs_as_the_model_with_other_data_and_rows(function: Callable[..., Any], groups: int, rows: int) -> None:
    net, _, found = captured(function)
    assert len(opaque(found)) == groups
    params = list(net.parameters())
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    expected = net(x)
    right = torch.autograd.grad(expected.sum(), params)
    (got,) = found.gm(*params, x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(got.sum(), params), right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_two_captures_give_the_same_graph() -> None:
    assert captured(written_by_index)[2].graph_json == captured(written_by_index)[2].graph_json


def test_what_is_returned_must_have_known_extents() -> None:
    with pytest.raises(CaptureError, match="depend on data, and the model returns it"):
        captured(lambda net, x: x[x > 0])


@torch.jit.script
def halved(x: Tensor) -> Tensor:
    return x / 2


def up_to_the_longest(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(lengths.max())[None] < lengths[:, None]).to(x.dtype)


def added_to_what_is_as_long(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return (x + up_to_the_longest(net, x, lengths)).sum(1)


def scripted(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return halved(up_to_the_longest(net, x, lengths)).sum(1)


def scripted_beside(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    mask = up_to_the_longest(net, x, lengths)
    return (mask + halved(mask)).sum(1)


class Aligned(nn.Module):
    def __init__(self, function: Callable[..., Any], width: int) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(width, width), function

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.function(self, self.layer(x), lengths)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (added_to_what_is_as_long, "takes an extent that data tell"),
        (scripted, "what other rows would give the scripted function halved is not known"),
        (scripted_beside, "what other rows would give the scripted function halved is not known"),
    ],
)
@pytest.mark.parametrize("longest", [WIDTH, 12])
def test_an_extent_that_data_tell_is_not_taken_for_another(
    function: Callable[..., Any], cause: str, longest: int
) -> None:
    """Be it as many as the columns, or a multiple of the rows in this batch."""
    net, x, lengths = Aligned(function, longest), torch.randn(ROWS, longest), torch.tensor([1, longest, 2, 2])
    with pytest.raises(CaptureError, match=cause):
        trace(Sample(net, (x, lengths), {}, CPU, ROWS, (1, 1)))


def test_what_the_model_itself_checks_of_an_extent_is_its_word() -> None:
    def checked(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
        mask = up_to_the_longest(net, x, lengths)
        torch._check(mask.shape[1] == x.shape[1])
        return x + mask

    args = torch.randn(ROWS, WIDTH), torch.tensor([1, 3, 2, 2])
    trace(Sample(Aligned(checked, WIDTH), args, {}, CPU, ROWS, (1, 1)))


@pytest.mark.parametrize("function", [scripted, scripted_beside])
def test_what_scripted_functions_make_of_extents_that_data_tell(function: Callable[..., Any]) -> None:
    net, x = Aligned(function, WIDTH), torch.randn(ROWS, WIDTH)
    found = capture(net, (x, torch.tensor([1, 12, 2, 2])), {}, device=CPU, rows=ROWS)
    for lengths in (torch.tensor([3, 1, 2]), torch.tensor([1, 2, 15])):
        torch.testing.assert_close(found.gm(*net.parameters(), x[:3], lengths)[0], net(x[:3], lengths))


def test_what_an_operator_asks_of_chance_decides_nothing() -> None:
    """A convolution asks whether there is anything."""

    def convolved(net: Net, x: Tensor) -> Tensor:
        drawn = torch.arange((torch.rand(()) < 0.5).long() * 4, dtype=x.dtype)
        return x + F.conv1d(drawn[:, None, None], x.new_ones(1, 1, 1)).sum()

    torch.manual_seed(0)
    net, x, found = captured(convolved)
    for seed in range(8):
        torch.manual_seed(seed)
        expected = net(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(found.gm(*net.parameters(), x)[0], expected)


class Stripped(nn.Module):
    """Returns what masks choose, one of them beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        shown = torch.arange(x.shape[1]) < lengths[:, None]
        made = self.first(x)[shown]
        return self.last(made) * 2, x.sum(-1)[shown]


def stripped(rows: int, shortest: int = 5) -> tuple[Tensor, Tensor]:
    lengths = torch.full((rows,), 5)
    lengths[0] = shortest
    return torch.randn(rows, 5, WIDTH, dtype=torch.float64), lengths


def test_what_masks_choose_is_returned_where_they_choose_all_and_each_batch_is_asked() -> None:
    net = Stripped().double()
    found = capture(net, stripped(ROWS), {}, device=CPU, rows=ROWS)
    assert [value.shape[0] for value in found.gm(*net.parameters(), *stripped(3))] == [15, 15]
    x, lengths = stripped(7)
    for mine, right in zip(found.gm(*net.parameters(), x, lengths), net(x, lengths), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    questions = [assumption.question for assumption in found.assumptions]
    assert len(questions) == 2
    for question in questions:
        assert question is not None
        assert question.holds([float(number) for number in question.ask(stripped(7))])
        assert not question.holds([float(number) for number in question.ask(stripped(7, shortest=4))])


def test_what_masks_choose_is_not_returned_where_a_row_is_shorter() -> None:
    with pytest.raises(CaptureError, match="depend on data, and the model returns it"):
        capture(Stripped().double(), stripped(ROWS, shortest=4), {}, device=CPU, rows=ROWS)


def test_masks_of_what_the_model_computes_are_not_asked() -> None:
    # Of this batch they choose all; nobody could ask the next one.
    with pytest.raises(CaptureError, match="depend on data, and the model returns it"):
        captured(lambda net, x: x[x > -2])


class Trimmed(nn.Module):
    """Gives as many columns as there are in the longest row."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(x.detach().numpy().argmax(1).max()) + 1]


def test_a_result_whose_extents_depend_on_data_does_not_leave_what_stays_whole() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Trimmed())
    x = torch.eye(3).repeat(2, 1)[:ROWS]
    nn.init.eye_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    found = capture(net, (x,), {}, device=CPU, rows=ROWS, options=CaptureOptions(("1",)))
    with pytest.raises(CaptureError, match="has made a tensor of shape"):
        found.gm(net[0].weight, net[0].bias, torch.eye(3)[:1].repeat(ROWS, 1))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + float(x.detach().numpy().mean())
        return x - self.mean


def test_buffers_that_what_stays_whole_assigns_are_declared() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts())
    found = capture(net, (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS)
    (op,) = opaque(found)
    graph = json.loads(found.graph_json)
    assert op["mutates"] == [graph["buffers"][0]["value"]]
    assert "row_wise" not in op


class Numbers(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x, float(x.detach().numpy().sum())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Numbers(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, number = self.inner(x)
        return self.last(y) * number  # type: ignore[no-any-return]


@pytest.mark.parametrize("named", [[], ["1.inner"]], ids=["found", "named"])
def test_what_gives_numbers_is_widened_to_what_takes_them(named: list[str]) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Outer(), nn.Linear(WIDTH, WIDTH))
    found = capture(net, (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS, options=CaptureOptions(tuple(named)))
    assert [kept.paths for kept in found.kept_whole] == [("1",)]


def test_like_layers_are_kept_whole_at_once() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counts()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)  # type: ignore[no-any-return]

    net = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, WIDTH))
    found = capture(net, (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS)
    assert [kept.paths for kept in found.kept_whole] == [("0.inner", "1.inner")]


class Experts(nn.Module):
    """Runs those of its layers that some row chooses: next time it may be others."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot((x[:, 0] > 0).long(), 2)
        made = torch.zeros_like(x)
        for expert in chosen.sum(0).nonzero():
            (rows,) = torch.where(chosen[:, expert[0]])
            made = made.index_add(0, rows, x[rows] @ self.weights[expert[0]])
        return made


def test_a_loop_over_what_meets_a_condition_stays_whole_however_large() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 1))
    found = capture(net, (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS)
    assert [kept.paths for kept in found.kept_whole] == [("1",)]
    assert "as a loop over them does" in found.kept_whole[0].cause
    assert not found.assumptions
    with pytest.raises(CaptureError, match="how many elements of a tensor meet a condition"):
        capture(Experts(), (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS)


def test_trials_that_take_too_long_find_nothing() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 1))
    for seconds, found in ((600.0, (True,)), (0.0, (False,))):
        with within(seconds):
            assert capture(net, (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS).row_wise == found


def test_a_capture_leaves_buffers_of_what_stays_whole_alone() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts(), Counts(), Outer())
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    capture(net, (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS)
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


def test_numbers_of_tensors_that_nothing_goes_into_are_numbers() -> None:
    def relative(net: Net, x: Tensor) -> Tensor:
        places = torch.arange(0, x.shape[1]).to(x.dtype)
        every_other = torch.cat([places.new_tensor([-1.0]), places[1::2]])
        distances = torch.arange(every_other[0] + 2 * len(places), places[-1] - places[0], -1, dtype=torch.long)
        return net.last(x)[:, distances % WIDTH]

    torch.manual_seed(0)
    net, x = Net(relative), torch.randn(ROWS, WIDTH)
    captured = capture(net, (x,), {}, device=CPU, rows=ROWS)
    assert not captured.kept_whole
    assert not captured.assumptions
    longer = torch.randn(ROWS + 3, WIDTH)
    (made,) = captured.gm(*net.parameters(), longer)
    assert torch.equal(made, net(longer))


def test_numbers_of_state_arguments_and_chance_are_not_taken_for_known() -> None:
    def scaled(of: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
        return lambda net, x: net.last(x) * of(net, x).item()

    for of in (lambda net, x: net.scale.max(), lambda net, x: x.detach().max(), lambda net, x: torch.rand(())):
        net, x = Net(scaled(of)), torch.randn(ROWS, WIDTH)
        net.register_buffer("scale", torch.ones(1))
        captured = capture(net, (x,), {}, device=CPU, rows=ROWS)
        net.scale.fill_(3)
        torch.manual_seed(1)
        expected = net(2 * x)
        torch.manual_seed(1)
        (made,) = captured.gm(*net.parameters(), *net.buffers(), 2 * x)
        assert torch.equal(made, expected)


def test_a_number_that_data_was_written_over_is_not_taken_for_known() -> None:
    def counted(net: Net, x: Tensor) -> Tensor:
        counts = torch.zeros(2)
        counts[0] = x.detach().max()
        return net.last(x) * counts[0:1].item()

    net, x = Net(counted), torch.randn(ROWS, WIDTH)
    captured = capture(net, (x,), {}, device=CPU, rows=ROWS)
    (made,) = captured.gm(*net.parameters(), 2 * x)
    assert torch.equal(made, net(2 * x))


class Twice(nn.Module):
    """Uses one weight under two names, and a number that only data tell."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)) * float(x.detach().numpy().shape[1]))


def test_what_stays_whole_takes_a_weight_under_all_its_names() -> None:
    net, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice()), torch.randn(ROWS, WIDTH)
    found = capture(net, (x,), {}, device=CPU, rows=ROWS, options=CaptureOptions(("1",)))
    own = [nn.Parameter(3 * net.get_parameter(name).detach()) for name in found.params]
    expected = torch.func.functional_call(net, dict(zip(found.params, own, strict=True)), x)
    (made,) = found.gm(*own, x)
    assert torch.equal(made, expected)
    gradients, right = (torch.autograd.grad(result.sum(), own) for result in (made, expected))
    assert all(torch.equal(*pair) for pair in zip(gradients, right, strict=True))


def test_a_module_under_two_names_in_what_stays_whole_is_left_as_it_was() -> None:
    layer = Twice()
    net, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(layer, layer)), torch.randn(ROWS, WIDTH)
    before = dict(net.named_parameters(remove_duplicate=False))
    found = capture(net, (x,), {}, device=CPU, rows=ROWS, options=CaptureOptions(("1",)))
    assert torch.equal(*found.gm(*(net.get_parameter(name) for name in found.params), x), net(x))
    assert all(net.get_parameter(name) is param for name, param in before.items())


def test_what_is_whole_around_a_part_takes_a_weight_that_both_have() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)
            self.last.weight = self.inner[0].weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x * float(x.detach().numpy().shape[1])))

    net, x = Around(), torch.randn(ROWS, WIDTH)
    found = capture(net, (x,), {}, device=CPU, rows=ROWS, options=CaptureOptions((Part("", around="inner").text,)))
    own = [nn.Parameter(3 * net.get_parameter(name).detach()) for name in found.params]
    expected = torch.func.functional_call(net, dict(zip(found.params, own, strict=True)), x)
    (made,) = found.gm(*own, x)
    assert torch.equal(made, expected)


def test_what_is_whole_around_a_part_takes_a_weight_from_inside_of_it() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            made = F.linear(y, self.inner[0].weight)
            return made * float(abs(made.detach().numpy()).shape[1])  # type: ignore[no-any-return]

    net, x = Around(), torch.randn(ROWS, WIDTH)
    found = capture(net, (x,), {}, device=CPU, rows=ROWS, options=CaptureOptions((Part("", around="inner").text,)))
    own = [nn.Parameter(3 * net.get_parameter(name).detach()) for name in found.params]
    expected = torch.func.functional_call(net, dict(zip(found.params, own, strict=True)), x)
    (made,) = found.gm(*own, x)
    assert torch.equal(made, expected)


def test_what_is_whole_around_a_part_packs_rows_with_a_mask_of_pairs(assert_equals_model: Any) -> None:
    class Around(nn.Module):
        """Attends to the elements of all rows in one sequence, each to those of its own row."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, x: Tensor) -> Tensor:
            packed = torch.cat(list(x)).unsqueeze(0)
            mask = torch.block_diag(*(torch.ones(len(row), len(row)) for row in x)).bool()
            return self.inner(packed, mask)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            made = self.layer(x)
            return F.scaled_dot_product_attention(made, made, made, mask).squeeze(0)

    options = CaptureOptions((Part("", around="inner").text,))
    assert_equals_model(Around().double(), lambda rows: ((torch.randn(rows, 2, WIDTH).double(),), {}), options=options)


def test_what_is_known_to_stay_whole_is_not_found_out_again() -> None:
    net, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Outer(), nn.Linear(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH)
    first = capture(net, (x,), {}, device=CPU, rows=ROWS)
    traced: list[Trace] = []

    def tracing(*args: Any) -> Trace:
        traced.append(trace(*args))
        return traced[-1]

    again = capture(net, (x,), {}, device=CPU, rows=ROWS, kept_whole=first.kept_whole, tracing=tracing)
    assert (again.kept_whole, len(traced)) == (first.kept_whole, 1)
    assert Graph.from_json(again.graph_json).hash() == Graph.from_json(first.graph_json).hash()


class Ones(nn.Module):
    """Takes nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        if (x.detach().numpy() != 1).any():
            raise ValueError("there is something else than ones")
        return x + 1


def test_what_stays_whole_is_tried_with_what_was_written_to_its_arguments() -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ones, self.last = Ones(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            filled = torch.full_like(x, 7.0)
            for column in range(WIDTH):
                filled[:, column] = 1.0
            return self.last(self.ones(filled)) + x  # type: ignore[no-any-return]

    found = capture(Filling(), (torch.randn(ROWS, WIDTH),), {}, device=CPU, rows=ROWS)
    assert [kept.paths for kept in found.kept_whole] == [("ones",)]


class Lazy(nn.Module):
    """Fills a buffer when it sees how long a row is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[0] != x.shape[1]:
            self.places = torch.arange(x.shape[1], dtype=x.dtype)
        return x * self.places


def test_a_buffer_that_the_first_call_sizes() -> None:
    net, x = Lazy(), torch.randn(ROWS, WIDTH)
    with pytest.raises(CaptureError, match=r"into buffer places, whose shape is \(1,\): buffers keep their shapes"):
        capture(net, (x,), {}, device=CPU, rows=ROWS)
    expected = net(x)
    found = capture(net, (x,), {}, device=CPU, rows=ROWS)
    torch.testing.assert_close(found.gm(net.places, x)[0], expected)
