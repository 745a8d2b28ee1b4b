"""What cannot be captured is refused with the place in the model and advice; what can be told apart is."""

from __future__ import annotations

import json
import linecache
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import CaptureOptions, batch_rows, by_extents, capture, flatten, signature
from pyrannc.errors import CaptureError, InputError

CPU = torch.device("cpu")


class Calls(nn.Module):
    """Calls a function; `inner` gives the place a module path."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Outer(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Calls(function)

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def fixed_view(x: Tensor) -> Tensor:
    return x.view(4, -1, 3)  # here


def python_loop(x: Tensor) -> Tensor:
    return sum(x[row] for row in range(x.shape[0]))  # type: ignore[return-value]  # here


def not_affine(x: Tensor) -> Tensor:
    return x * (x.shape[0] ** 2)  # here


def not_affine_extent(x: Tensor) -> Tensor:
    return (x.unsqueeze(0) + x.unsqueeze(1)).flatten(0, 1)  # here


def halves(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2]  # here


def data_in_argument(x: Tensor) -> Tensor:
    return x * x.sum().item()  # here


def data_dependent_shape(x: Tensor) -> Tensor:
    return x[x > 0]  # here


def through_numpy(x: Tensor) -> Tensor:
    return x + float(x.numpy().sum())  # here


def layer_drop(x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.3 else x * 2  # here


def batch_size_result(x: Tensor) -> Any:
    return x, x.shape[0]


@pytest.mark.parametrize(
    "function",
    [
        fixed_view, not_affine_extent, halves, data_dependent_shape,
    ],
)  # fmt: skip
def test_refusal_names_module_and_line(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(Outer(function), (torch.randn(4, 3),), {}, device=CPU, rows=4)
    message = str(refusal.value)
    assert "'inner'" in message
    line = int(message.split(f"{__file__}:")[1].split(")")[0])
    assert "# here" in linecache.getline(__file__, line)


@pytest.mark.parametrize("function", [python_loop, through_numpy, layer_drop])
def test_what_cannot_be_traced_stays_whole(function: Callable[..., Any]) -> None:
    captured = capture(Outer(function), (torch.randn(4, 3),), {}, device=CPU, rows=4)
    (kept,) = captured.kept_whole
    assert kept.paths == ("inner",)
    assert kept.place.file == __file__
    assert "# here" in linecache.getline(__file__, kept.place.line)


@pytest.mark.parametrize("function", [not_affine, data_in_argument])
def test_numbers_that_depend_on_the_batch_stay_with_what_takes_them(function: Callable[..., Any]) -> None:
    captured = capture(Outer(function), (torch.randn(4, 3),), {}, device=CPU, rows=4)
    (op,) = (op for op in json.loads(captured.graph_json)["ops"] if op.get("opaque"))
    assert op["target"].startswith("pyrannc.opaque.data_dependent.")


def test_batch_size_as_result_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns a number computed from the batch size"):
        capture(Outer(batch_size_result), (torch.randn(4, 3),), {}, device=CPU, rows=4)


def test_a_branch_by_the_number_of_rows_is_noted() -> None:
    alone = Outer(lambda x: x * 2 if x.shape[0] == 1 else x)
    for rows in (1, 2):
        found = capture(alone, (torch.ones(rows, 3),), {}, device=CPU, rows=rows)
        assert found.alone == (rows == 1)
        assert [item.holds(count) for item in found.row_conditions for count in (1, 2, 3)] == [False, True, True]
    # A batch is traced with another number of rows than any other extent, which it divides.
    even = capture(Outer(lambda x: x * 2 if x.shape[0] % 2 == 0 else x), (torch.ones(4, 4),), {}, device=CPU, rows=4)
    assert [str(item) for item in even.row_conditions] == ["Eq(Mod(rows, 2), 0) (yes)"]
    chosen = Outer(lambda x: [x, x * 2][int(x.shape[0] > 12)])
    assert [str(item) for item in capture(chosen, (torch.ones(2, 3),), {}, device=CPU, rows=2).row_conditions]
    convolved = Outer(lambda x: torch.conv1d(x[:, None], x.new_ones(1, 1, 3))[:16])
    found = capture(convolved, (torch.ones(2, 8),), {}, device=CPU, rows=2)
    assert [str(item) for item in found.row_conditions] == ["rows >= 16 (no)"]
    few = Outer(lambda x: x * 2 if x.shape[0] > 3 else x)
    with pytest.raises(CaptureError, match=r"'inner' \(.*goes by the number of rows \(rows > 3 \(yes\)\)"):
        capture(few, (torch.ones(3, 3),), {}, device=CPU, rows=3)


class _WithStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor, first: Tensor, cell: Tensor) -> Tensor:
        return self.layer(x, (first, cell))[0]  # type: ignore[no-any-return]


def test_states_whose_rows_are_another_dimension_are_named() -> None:
    batch = torch.randn(6, 3, 4), torch.zeros(1, 6, 4), torch.zeros(1, 6, 4)
    with pytest.raises(
        CaptureError, match=r"Tensor 1 of the arguments \(shape \(1, 6, 4\)\) has 6 in dimension 1, .*turn"
    ):
        capture(_WithStates(), batch, {}, device=CPU, rows=6)


def test_error_of_the_model_is_chained() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("own error")

    with pytest.raises(CaptureError, match=r"'inner'.*own error") as refusal:
        capture(Outer(fails), (torch.randn(4, 3),), {}, device=CPU, rows=4)
    assert isinstance(refusal.value.__cause__, KeyError)


def test_module_backward_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="sub-module '0' has a module backward hook"):
        capture(model, (torch.randn(4, 3),), {}, device=CPU, rows=4)


def test_unregistered_trainable_tensor_is_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(CaptureError, match="neither a parameter nor an input"):
        capture(Outer(lambda x: x * weight), (torch.randn(4, 3),), {}, device=CPU, rows=4)


class Helper:
    def __init__(self) -> None:
        self.kept = torch.zeros(3)
        self.lists = ([torch.zeros(3)],)


class Holds(nn.Module):
    """Runs a function on itself, which holds tensors that are no buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.bank = torch.zeros(3)
        self.state = {"mean": torch.zeros(3)}
        self.helper = Helper()
        self.register_buffer("own", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


STATISTICS = torch.zeros(3)


def advances_attribute(self: Any, x: Tensor) -> Tensor:
    self.bank.mul_(0.9).add_(x.detach().mean(0))  # here
    return x - self.bank


def advances_in_dict(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.state["mean"][0] += x.mean()  # here
    return x - self.state["mean"]


def advances_in_helper(self: Any, x: Tensor) -> Tensor:
    torch.add(self.helper.kept, 1, out=self.helper.kept)  # here
    return x * self.helper.kept


def advances_in_lists(self: Any, x: Tensor) -> Tensor:
    self.helper.lists[0][0].view(3, 1)[1].copy_(x.detach().sum(1)[:1])  # here
    return x * 2


def advances_global(self: Any, x: Tensor) -> Tensor:
    STATISTICS.add_(x.detach().mean(0))  # here
    return x * 2


def advances_data(self: Any, x: Tensor) -> Tensor:
    self.bank.data.add_(1)  # here
    return x * 2


def advances_default(self: Any, x: Tensor, hidden: Tensor = torch.zeros(3)) -> Tensor:  # noqa: B008  # one for all
    hidden.add_(1)  # here
    return x * 2


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (advances_attribute, "attribute \"bank\" of sub-module '1'"),
        (advances_in_dict, "attribute \"state\" of sub-module '1'"),
        (advances_in_helper, "attribute \"helper\" of sub-module '1'"),
        (advances_in_lists, "attribute \"helper\" of sub-module '1'"),
        (advances_global, f'global variable "STATISTICS" of {__name__}'),
        (advances_data, "from outside"),
        (advances_default, "from outside"),
    ],
)
def test_tensors_from_outside_that_the_forward_changes_are_refused(function: Any, held: str) -> None:
    with pytest.raises(CaptureError, match="keeps tensors for the next call") as refusal:
        capture(nn.Sequential(nn.Linear(3, 3), Holds(function)), (torch.randn(4, 3),), {}, device=CPU, rows=4)
    message = str(refusal.value)
    assert held in message
    assert "self.register_buffer(" in message
    line = int(message.split(f"{__file__}:")[1].split(")")[0])
    assert "# here" in linecache.getline(__file__, line)


@pytest.mark.parametrize(
    "function", [advances_attribute, advances_in_dict, advances_in_helper, advances_in_lists, advances_global]
)
def test_what_stays_whole_may_not_change_them_either(function: Any) -> None:
    model, options = nn.Sequential(nn.Linear(3, 3), Holds(function)), CaptureOptions(("1",))
    with pytest.raises(CaptureError, match=r"^sub-module '1' .* keeps tensors for the next call.*register_buffer"):
        capture(model, (torch.randn(4, 3),), {}, device=CPU, rows=4, options=options)


def changes_buffer(self: Any, x: Tensor) -> Tensor:
    self.own.add_(x.detach().mean(0))
    return x - self.own


def changes_what_it_makes(self: Any, x: Tensor) -> Tensor:
    made = [torch.tensor([0.0, 1.0, 2.0]), torch.from_numpy(np.zeros(3, np.float32)), x.new_tensor([1.0]), x.new(3)]
    made += [self.bank.clone(), STATISTICS.to(torch.float64), STATISTICS[:2].t().flip(0)[:1].contiguous()]
    for tensor in (*made, torch.Tensor([1, 2, 3]), torch.zeros(3)):
        x = x + tensor.fill_(1).add_(x.detach().mean())
    return x


def makes_cache(self: Any, x: Tensor) -> Tensor:
    if "ones" not in self.state:
        self.state["ones"] = torch.zeros(3).add_(1)
    return x * self.state["ones"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("whole", [(), ("1",)])
@pytest.mark.parametrize("function", [changes_buffer, changes_what_it_makes, makes_cache])
def test_other_tensors_may_be_changed(function: Any, whole: tuple[str, ...]) -> None:
    model, options = nn.Sequential(nn.Linear(3, 3), Holds(function)), CaptureOptions(whole)
    capture(model, (torch.randn(4, 3),), {}, device=CPU, rows=4, options=options)


def test_unknown_leaf_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="no sub-module 'missing'"):
        capture(nn.Linear(3, 3), (torch.randn(4, 3),), {}, device=CPU, rows=4, options=CaptureOptions(("missing",)))


def test_inputs_of_another_structure_are_refused() -> None:
    captured = capture(nn.Linear(3, 3), (torch.randn(4, 3),), {}, device=CPU, rows=4)
    with pytest.raises(InputError, match="structure"):
        captured.input_tensors((), {"input": torch.randn(4, 3)})


def test_signature_tells_what_needs_another_capture() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())

    def of(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Hashable:
        tensors, structure = flatten((args, kwargs))
        return signature(model, tensors, structure, by_extents(tensors, batch_rows(tensors)))

    base = of((torch.randn(4, 3),), {})
    assert base == of((torch.randn(7, 3),), {})
    assert hash(base) == hash(of((torch.randn(7, 3),), {}))
    assert base != of((torch.randn(4, 2, 3),), {})
    assert base != of((torch.randn(4, 3).double(),), {})
    assert base != of((), {"input": torch.randn(4, 3)})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert base != of((torch.randn(4, 3),), {})
    model.eval()
    assert base != of((torch.randn(4, 3),), {})


def test_meta_parameters_and_a_device_that_is_not_here() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    captured = capture(model, (torch.randn(4, 3),), {}, device=torch.device("cuda", 0), rows=4)
    assert all(node.meta["val"].device == torch.device("cuda", 0) for node, _ in captured.values)


def test_ambient_autocast_shows_in_types() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(nn.Linear(3, 4), (torch.randn(4, 3),), {}, device=CPU, rows=4)
    graph = json.loads(captured.graph_json)
    assert graph["values"][graph["outputs"][0]]["dtype"] == "bfloat16"


def test_batch_rows_is_that_of_the_first_tensor_with_dimensions() -> None:
    tensors, _ = flatten(((torch.tensor(1.0), {"x": torch.zeros(5, 2)}), {"y": torch.zeros(3)}))
    assert batch_rows(tensors) == 5
    with pytest.raises(ValueError, match="batch size"):
        batch_rows([torch.tensor(1.0)])
