"""What a forward carries from call to call, and hooks on its modules, are refused, or noted."""

from __future__ import annotations

import collections
import copy
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from pyrannc.call.guards import ModuleGuards
from pyrannc.capture import Captured, CaptureOptions, capture
from pyrannc.errors import CaptureError


class Keeps(nn.Module):
    """Runs a function on itself; what that does to attributes is the case."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = forward
        self.count = 0
        self.cache: Any = None
        self.bank = torch.zeros(())
        self.seen: list[Any] = []
        self.known: dict[str, Any] = {}
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.inner(x))


def captured(forward: Callable[[Any, Tensor], Tensor], change: Callable[[Any], Any] = lambda _: None) -> Captured:
    model = nn.Sequential(Keeps(forward))
    change(model[0])
    return capture(model, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4)


def counts(self: Any, x: Tensor) -> Tensor:
    self.count += 1  # here
    return x * self.count


def counts_modulo(self: Any, x: Tensor) -> Tensor:
    self.count = 1 - self.count
    return x


def keeps_mean(self: Any, x: Tensor) -> Tensor:
    self.cache = x.mean() if self.cache is None else 0.9 * self.cache + x.mean()
    return x - self.cache


def changes_in_place(self: Any, x: Tensor) -> Tensor:
    self.bank.mul_(0.9).add_(x.mean().detach())
    return x - self.bank


def appends(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return x


def keeps_number(self: Any, x: Tensor) -> Tensor:
    if "mean" not in self.known:
        self.known["mean"] = x.detach().abs().mean().item()
    return x * self.known["mean"]


def keeps_first(self: Any, x: Tensor) -> Tensor:
    mean = float(np.abs(x.detach().numpy()).mean())
    if self.cache is None:
        self.cache = mean
    return x * self.cache  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (counts, r"'0'.*test_carried.py.*counts from call to call.*\"count\" of sub-module '0'"),
        (counts_modulo, "counts from call to call"),
        (keeps_mean, r'keeps tensors for the next call.*"cache" of.*register_buffer\("cache"'),
        (changes_in_place, 'keeps tensors for the next call.*"bank" of'),
        (appends, '"seen" of'),
        (keeps_first, 'counts from call to call.*"cache" of'),
        (keeps_number, 'counts from call to call.*"known" of'),
    ],
)
def test_what_is_carried_from_call_to_call_is_refused(forward: Callable[..., Tensor], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        captured(forward)


class OwnDict(dict[Any, Any]):
    """Does something else where it is filled."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value + 1)

    def update(self, *_: Any, **__: Any) -> None:
        raise AssertionError


CONTAINERS: list[Any] = [
    {0: 0}, collections.Counter({0: 0}), collections.defaultdict(int), OrderedDict({0: 0}), OwnDict({0: 0}),
    [0], deque([0], maxlen=1),
]  # fmt: skip


def counts_in_a_container(self: Any, x: Tensor) -> Tensor:
    self.cache[0] += 1
    return x * self.cache[0]  # type: ignore[no-any-return]


def keeps_in_a_container(self: Any, x: Tensor) -> Tensor:
    before, self.cache[0] = self.cache[0], x.mean()
    return x - before


@pytest.mark.parametrize("forward", [counts_in_a_container, keeps_in_a_container])
@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: type(container).__name__)
def test_what_a_container_carries_is_refused(container: Any, forward: Callable[..., Tensor]) -> None:
    container = copy.deepcopy(container)
    before = repr(container)
    with pytest.raises(CaptureError, match=r'(counts from|keeps tensors for the next) call.*"cache" of'):
        captured(forward, lambda module: setattr(module, "cache", container))
    assert repr(container) == before


def fills_cache(self: Any, x: Tensor) -> Tensor:
    if self.cache is None or self.cache.shape[0] != x.shape[1]:
        self.cache = torch.arange(x.shape[1])
    self.count = max(self.count, x.shape[1])
    if "width" not in self.known:
        self.known["width"] = x.shape[1]
    self.known["rows"] = x.shape[0]
    self.known["mean"] = x.detach().abs().mean().item()
    return x * self.cache * self.known["width"] * self.known["mean"]


def test_caches_are_no_state() -> None:
    assert not captured(fills_cache).python_state.written


def only_writes(self: Any, x: Tensor) -> Tensor:
    self.cache, self.shape = x, x.shape
    return self.cache * 2  # type: ignore[no-any-return]


def test_what_is_only_written_is_noted() -> None:
    state = captured(only_writes).python_state
    assert {(found.path, found.name) for found in state.written} == {("0", "cache"), ("0", "shape")}
    assert "count" not in {found.name for found in state.read if found.path == "0"}


class Doubles:
    def __call__(self, module: nn.Module, args: Any) -> Any:
        return None


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.inner.register_forward_pre_hook(Doubles()),
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
    ],
)
def test_forward_hooks_are_refused(register: Callable[[Any], Any]) -> None:
    handles: list[Any] = []
    with pytest.raises(CaptureError, match=r"hook .* of (sub-module '0|all modules|the calls)|on the calls of all"):
        captured(lambda _, x: x, lambda module: handles.append(register(module)))
    handles[0].remove()


class Slot:
    """Counts where nobody else looks."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def step(self) -> None:
        self.__count += 1


class Counter:
    total = 0

    def __init__(self) -> None:
        self.slot = Slot()
        self.inside: Any = {"a": [({"b": [{"c": [[]]}]},)]}
        self.queue: Any = deque([[0]])
        self.array = np.zeros(2)
        self.numbers = itertools.count()

    def deep(self) -> None:
        self.inside["a"][0][0]["b"][0]["c"][0].append(1)

    def far(self) -> None:
        FAR[90].append(1)

    def of_class(self) -> None:
        Counter.total += 1

    def in_queue(self) -> None:
        self.queue[0][0] += 1

    def in_array(self) -> None:
        self.array[1] += 1

    def next_number(self) -> None:
        next(self.numbers)

    def in_private_slot(self) -> None:
        self.slot.step()


FAR: list[list[int]] = [[] for _ in range(100)]


@pytest.mark.parametrize("count", ["deep", "far", "of_class", "in_queue", "in_array", "next_number", "in_private_slot"])
def test_forward_hooks_that_keep_something_deep_inside_are_refused(count: str) -> None:
    counter = Counter()

    def halves(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        getattr(counter, count)()
        return out / 2

    def change(module: Any) -> None:
        module.inner.register_forward_hook(halves)

    with pytest.raises(CaptureError, match=r"the forward hook .*halves of sub-module '0.inner' keeps something"):
        captured(lambda _, x: x, change)


def test_forward_hooks_that_keep_nothing_are_captured() -> None:
    counter = Counter()

    def change(module: Any) -> None:
        module.inner.register_forward_hook(lambda inner, args, out: out / (1 + len(counter.queue)))

    assert "aten::div" in captured(lambda _, x: x, change).graph_json.replace(".", "::")


UNREGISTERED = nn.Tanh()


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_of_modules_that_are_no_sub_modules_are_refused(kind: str) -> None:
    found = captured(lambda _, x: UNREGISTERED(x))
    guards = ModuleGuards(nn.Sequential(), found.python_state)
    assert guards.hold()
    handle = getattr(UNREGISTERED, f"register_{kind}")(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="is on a Tanh that is no sub-module"):
            guards.hold()
        with pytest.raises(CaptureError, match="is on a Tanh that is no sub-module"):
            captured(lambda _, x: UNREGISTERED(x))
    finally:
        handle.remove()


def test_outputs_that_transformers_collects_by_hooks_are_captured_each_time() -> None:
    sizes: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager")).double()
    call = {"input_ids": torch.randint(9, (3, 4)), "output_hidden_states": True, "use_cache": False}
    expected = copy.deepcopy(model)(**call)
    assert len(expected.hidden_states) == 3
    state = dict([*model.named_parameters(), *model.named_buffers()])
    # The second capture finds the hooks there; the third has some on what stays whole.
    for leaves in ([], [], ["layers.1.self_attn"]):
        own = {**call, "output_attentions": bool(leaves)}
        found = capture(model, (), own, device=torch.device("cpu"), rows=3, options=CaptureOptions(tuple(leaves)))
        made = found.gm(*(state[name] for name in (*found.params, *found.buffers)), *found.input_tensors((), own))
        outputs = found.hand_back(made, ((), own))
        torch.testing.assert_close(outputs.hidden_states, expected.hidden_states)
        assert len(outputs.get("attentions") or ()) == 2 * len(leaves)


class _Earlier(nn.Module):
    """What a model of transformers gives before its last layer, by way of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        self.inner = LlamaModel(LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager"))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.inner(tokens, output_hidden_states=True, use_cache=False).hidden_states[-2]
        return found


def test_what_stays_whole_may_read_what_transformers_collects_in_it() -> None:
    model = nn.Sequential(_Earlier(), nn.Linear(8, 8)).double()
    tokens = torch.randint(9, (3, 4))
    expected = copy.deepcopy(model)(tokens)
    state = dict([*model.named_parameters(), *model.named_buffers()])
    # An earlier call has put the hooks there.
    model(tokens)
    found = capture(model, (tokens,), {}, device=torch.device("cpu"), rows=3, options=CaptureOptions(("0",)))
    made = found.gm(*(state[name] for name in (*found.params, *found.buffers)), *found.input_tensors((tokens,), {}))
    torch.testing.assert_close(found.hand_back(made, ((tokens,), {})), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_hooks_of_torch_are_captured() -> None:
    def change(module: Any) -> None:
        nn.utils.weight_norm(module.inner)

    found = captured(lambda _, x: x, change)
    assert {"0.inner.weight_g", "0.inner.weight_v"} <= set(found.params)
