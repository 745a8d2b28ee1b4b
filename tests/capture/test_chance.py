"""What draws from Python's or NumPy's random numbers stays whole, or is refused where ranks could not draw alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from operator import getitem
from random import random as drawn_by_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from pyrannc.capture import Captured, capture
from pyrannc.capture.nodes.chance import alike_draws, other_states, torch_draws, trial_draws
from pyrannc.capture.nodes.ops import draws_random_numbers
from pyrannc.errors import CaptureError

RNG = random.Random(0)
"""A generator that the model's Python module holds; no other test draws from it."""
Forward = Callable[[Any, Tensor], Tensor]


class Part(nn.Module):
    """Runs a function on itself; what that draws is the case."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.run = run
        self.inner = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.inner(x))


def model_of(run: Forward) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Part(run), nn.Linear(3, 3))


def captured(model: nn.Module) -> Captured:
    return capture(model, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4)


def drops_layer(self: Any, x: Tensor) -> Tensor:
    return x if self.training and random.random() < 0.01 else self.other(x)


def drops_layer_by_numpy(self: Any, x: Tensor) -> Tensor:
    return x if self.training and np.random.uniform(0, 1) < 0.5 else self.other(x)


def draws_by_name(self: Any, x: Tensor) -> Tensor:
    return x * drawn_by_name()


def masks_rows(self: Any, x: Tensor) -> Tensor:
    mask = np.ones((len(x), 3), dtype=bool)
    for row in range(len(x)):
        mask[row, np.random.choice(3, np.random.randint(1, 3), replace=False)] = False
    return x * torch.from_numpy(mask)


def draws_until_it_suits(self: Any, x: Tensor) -> Tensor:
    first = random.randrange(1000)
    while (second := random.randrange(1000)) == first:
        pass
    return x * (first - second)


def mixes_seldom(self: Any, x: Tensor) -> Tensor:
    return x + x.mean(0) if random.random() < 0.01 else x * 2


def mixes_seldom_by_numpy(self: Any, x: Tensor) -> Tensor:
    return x + x.mean(0) if np.random.rand() > 0.99 else x * 2


def mixes_pairs(self: Any, x: Tensor) -> Tensor:
    share = np.random.beta(0.5, 0.5)
    return share * x + (1 - share) * x[torch.from_numpy(np.random.permutation(len(x)))]


@pytest.mark.parametrize(
    ("run", "row_wise"),
    [
        (drops_layer, True),
        (drops_layer_by_numpy, True),
        (draws_by_name, True),
        (masks_rows, True),
        (draws_until_it_suits, True),
        (mixes_seldom, False),
        (mixes_seldom_by_numpy, False),
        (mixes_pairs, False),
    ],
)
def test_what_draws_stays_whole(run: Forward, row_wise: bool) -> None:
    before = other_states()
    found = captured(model_of(run))
    assert [kept.paths for kept in found.kept_whole] == [("1",)]
    assert list(found.row_wise) == [row_wise]
    assert other_states() == before


def test_what_draws_in_training_alone_is_captured_in_evaluation() -> None:
    assert not captured(model_of(drops_layer).eval()).kept_whole


def test_ranks_whose_generators_differ_capture_alike() -> None:
    graphs = set()
    for seed in range(4):
        random.seed(seed)
        np.random.seed(seed)
        graphs.add(captured(model_of(lambda self, x: drops_layer_by_numpy(self, masks_rows(self, x)))).graph_json)
    assert len(graphs) == 1


class _ByMethod(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.one_of_two(x)

    def one_of_two(self, x: Tensor) -> Tensor:
        return self.inner(x) if random.random() < 1e-9 else self.other(x)


def test_a_method_that_draws_keeps_what_it_may_use() -> None:
    found = captured(nn.Sequential(_ByMethod(drops_layer)))
    (node,) = (node for node in found.op_nodes if "one_of_two" in str(getattr(node.target, "title", "")))
    assert len(node.args) == 5


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_hooks_that_draw_are_of_what_is_round_their_module(register: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Part(lambda _, x: x * 2)), nn.Linear(3, 3))
    outer = Around(model[1][0])
    model[1] = outer

    def hook(_module: nn.Module, args: Any, *made: Any) -> Any:
        return tuple(item * random.random() for item in args) if not made else made[0] * random.random()

    getattr(outer.part, register)(hook)
    assert [kept.paths for kept in captured(model).kept_whole] == [("1",)]


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]


def held(self: Any, x: Tensor) -> Tensor:
    return x * float(self.rng.random())


def held_as_function(self: Any, x: Tensor) -> Tensor:
    return x * self.rng()


def held_by_module(self: Any, x: Tensor) -> Tensor:
    return x * RNG.random()


def made_anew(self: Any, x: Tensor) -> Tensor:
    return x * float(np.random.default_rng().random())


def made_anew_in_what_stays_whole(self: Any, x: Tensor) -> Tensor:
    return x * x.sum().item() * float(np.random.default_rng().random())


def held_inside(self: Any, x: Tensor) -> Tensor:
    return x * float(next(iter(vars(self.rng).values() if hasattr(self.rng, "__dict__") else self.rng)).random())


def held_in_what_stays_whole(self: Any, x: Tensor) -> Tensor:
    return x * x.sum().item() * float(self.rng.random())


def made_of_a_seed(self: Any, x: Tensor) -> Tensor:
    return x * float(np.random.default_rng(3).random())


def drawn_by_torch(self: Any, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=self.rng)


def drawn_in_place_by_torch(self: Any, x: Tensor) -> Tensor:
    return x * torch.empty(x.shape).uniform_(generator=self.rng[0])


def drawn_by_torch_in_what_stays_whole(self: Any, x: Tensor) -> Tensor:
    return x * x.sum().item() * torch.rand(x.shape, generator=self.rng)


def drawn_by_torch_of_a_closure() -> Forward:
    own = torch.Generator()

    def run(self: Any, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=own)

    return run


@pytest.mark.parametrize(
    ("run", "generator", "text"),
    [
        (held, random.Random(0), 'from the generator "rng" of sub-module "1"'),
        (held, np.random.default_rng(0), 'from the generator "rng" of sub-module "1"'),
        (held, np.random.RandomState(0), 'from the generator "rng" of sub-module "1"'),
        (held_as_function, random.Random(0).random, 'from the generator "rng" of sub-module "1"'),
        (held_in_what_stays_whole, random.Random(0), 'from the generator "rng" of sub-module "1"'),
        (held_inside, [random.Random(0)], 'from the generator "rng" of sub-module "1"'),
        (held_inside, SimpleNamespace(own=np.random.default_rng(0)), 'from the generator "rng" of sub-module "1"'),
        (drawn_by_torch, torch.Generator(), "from a torch.Generator of its own"),
        (drawn_in_place_by_torch, [torch.Generator()], "from a torch.Generator of its own"),
        (drawn_by_torch_in_what_stays_whole, torch.Generator(), "from a torch.Generator of its own"),
        (drawn_by_torch_of_a_closure(), None, "from a torch.Generator of its own"),
        (held_by_module, None, 'from the generator "RNG" of .*test_chance'),
        (made_anew, None, "makes a generator without a seed"),
        (made_anew_in_what_stays_whole, None, "makes a generator without a seed"),
    ],
)
def test_generators_that_ranks_do_not_share_are_refused(run: Forward, generator: Any, text: str) -> None:
    model = model_of(run)
    model[1].rng = generator
    with pytest.raises(CaptureError, match=f"{text}.*torch.rand"):
        captured(model)


@pytest.mark.parametrize("generator", [random.random.__self__, np.random.random_sample.__self__])  # type: ignore[attr-defined]
def test_the_generator_of_all_may_be_held(generator: Any) -> None:
    model = model_of(held)
    model[1].rng = generator
    assert [kept.paths for kept in captured(model).kept_whole] == [("1",)]


@pytest.mark.parametrize("generator", [torch.default_generator, None])
def test_torchs_generator_may_be_given(generator: torch.Generator | None) -> None:
    model = model_of(drawn_by_torch)
    model[1].rng = generator
    assert [kept.paths for kept in captured(model).kept_whole] == ([("1",)] if generator else [])


def seeded_anew(self: Any, x: Tensor) -> Tensor:
    return drawn_by_torch(self, x) if self.rng.manual_seed(1) else x


def drawn_by_torch_of_a_seed(self: Any, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(3))


def draws_nothing_from_it(self: Any, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape)


@pytest.mark.parametrize("run", [seeded_anew, drawn_by_torch_of_a_seed, draws_nothing_from_it])
def test_a_generator_of_torch_that_no_call_advances_may_be_held(run: Forward) -> None:
    model = model_of(run)
    model[1].rng = torch.Generator().manual_seed(1)
    assert captured(model)


def test_a_generator_with_a_seed_is_a_constant() -> None:
    assert not captured(model_of(made_of_a_seed)).kept_whole


class AsksAfterwards(nn.Module):
    """Asks its data a question that takes what has drawn before."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Part(drops_layer_by_numpy), nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.part(x)
        counted = mask * (y * 0 + 1)
        return self.last(y) if bool((counted >= 0).all()) else y


def test_questions_behind_what_draws_are_asked() -> None:
    before = other_states()
    args = torch.randn(4, 3), torch.ones(4, 3)
    found = capture(AsksAfterwards(), args, {}, device=torch.device("cpu"), rows=4)
    assert [kept.paths for kept in found.kept_whole if "draws" in kept.cause] == [("part",)]
    assert [kept.paths for kept in found.kept_whole if "decides" in kept.cause] == [(">part",)]
    assert other_states() == before


def test_trials_begin_all_over_what_may_be_drawn() -> None:
    first = []
    for trial in range(5):
        with trial_draws(trial) as drew:
            assert not drew()
            first.append((random.random(), np.random.rand()))
            assert drew()
    for by_one in zip(*first, strict=True):
        assert min(by_one) < 0.005
        assert max(by_one) > 0.995
        assert len([share for share in by_one if 0.1 < share < 0.9]) == 3


def test_torch_draws_for_the_host_alone_where_no_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, None)
    before = torch.get_rng_state()
    with torch_draws(3, torch.device("cpu")):
        drawn = torch.rand(4)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("cuda", 1)])
def test_torch_draws_leave_the_gpu_that_is_used(device: torch.device | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, kept, restored = torch.Generator().manual_seed(7), [], []

    def get_rng_state(device: torch.device) -> Tensor:
        kept.append(device)
        return gpu.get_state()

    def set_rng_state(state: Tensor, device: torch.device) -> None:
        restored.append(device)
        gpu.set_state(state)

    stubs = {"is_initialized": lambda: True, "current_device": lambda: 1, "device": nullcontext}
    own = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state, "manual_seed": gpu.manual_seed}
    for name, item in {**stubs, **own, "manual_seed_all": None}.items():
        monkeypatch.setattr(torch.cuda, name, item)
    before = gpu.get_state()
    with torch_draws(3, device):
        assert gpu.initial_seed() == 3
    assert torch.equal(gpu.get_state(), before)
    with torch_draws(None, device):
        assert gpu.initial_seed() == 7
        torch.rand(3, generator=gpu)
    assert torch.equal(gpu.get_state(), before)
    assert kept == restored == [torch.device("cuda", 1)] * 2


def test_draws_are_alike_until_they_are_too_many() -> None:
    with alike_draws(0, 3):
        found = [random.random() for _ in range(6)]
    assert found[:3] == [found[0]] * 3
    assert found[3:] == [found[3]] * 3
    assert found[0] != found[3]


# Arguments that are changed in place


class Writes(nn.Module):
    """Changes its argument and cannot be traced; others read that before and after."""

    def __init__(self, write: Callable[..., Any], views: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.part = Calls(write)
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1
        before = torch.tanh(y) * 1
        returned = self.part(*self.views(y))
        return self.last(before * 10 + y + returned * 100)  # type: ignore[no-any-return]


class Calls(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Tensor) -> Any:
        return self.run(*args)


class Untraced:
    @staticmethod
    def one(x: Tensor) -> float:
        """One; no trace comes through here."""
        return float(np.abs(x.detach().numpy()).max() >= 0)


def adds(x: Tensor) -> Tensor:
    x += Untraced.one(x)
    return x


def fills_by_numpy(x: Tensor) -> Tensor:
    x.detach().numpy()[:, 0] = 2.0
    return x * 2


def fills_data(x: Tensor) -> Tensor:
    x.data[:, 1] = 3 * Untraced.one(x)
    return x * 2


def halves_a_column(x: Tensor) -> Tensor:
    x *= 0.5 * Untraced.one(x)
    return x.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("write", "views"),
    [
        (adds, lambda y: [y]),
        (fills_by_numpy, lambda y: [y]),
        (fills_data, lambda y: [y]),
        (halves_a_column, lambda y: [y[:, :2]]),
    ],
)
def test_what_stays_whole_may_change_an_argument(
    write: Callable[..., Any], views: Callable[[Tensor], Sequence[Tensor]]
) -> None:
    assert paths_of_equal(Writes(write, views)) == [("part",)]


def paths_of_equal(model: nn.Module) -> list[tuple[str, ...]]:
    """What stays whole of a model whose captured graph gives the same as the model itself."""
    x = torch.randn(4, 3)
    found = capture(model, (x,), {}, device=torch.device("cpu"), rows=4)
    state = [dict(model.named_parameters())[name] for name in found.params]
    (made,) = found.gm(*state, x)
    expected = model(x)
    assert torch.allclose(made, expected)
    gradients = (torch.autograd.grad(result.square().sum(), list(model.parameters())) for result in (made, expected))
    for mine, right in zip(*gradients, strict=True):
        assert torch.allclose(mine, right)
    return [kept.paths for kept in found.kept_whole]


def adds_to_first(x: Tensor, _other: Tensor) -> Tensor:
    x += Untraced.one(x)
    return x


def grows(x: Tensor) -> Tensor:
    x.unsqueeze_(0).add_(Untraced.one(x))
    return x.sum(0)


def sometimes(x: Tensor) -> Tensor:
    return adds(x) if random.random() < 0.5 else x * 1


@pytest.mark.parametrize(
    ("write", "views"),
    [
        (adds_to_first, lambda y: [y, y]),
        (adds_to_first, lambda y: [y, y[:, :1]]),
        (grows, lambda y: [y]),
    ],
)
def test_where_no_op_stands_for_a_change_more_stays_whole(
    write: Callable[..., Any], views: Callable[[Tensor], Sequence[Tensor]]
) -> None:
    assert paths_of_equal(Writes(write, views)) == [(">first",)]


def test_a_change_by_chance_is_no_op() -> None:
    model = Writes(sometimes, lambda y: [y])
    found = capture(model, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4)
    assert [kept.paths for kept in found.kept_whole] == [(">first",)]


class WritesParameter(Calls):
    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *args: Tensor) -> Any:
        self.weight.data.clamp_(max=0.5 * Untraced.one(args[0]))
        return args[0] * self.weight


def test_a_parameter_changed_past_autograd_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), WritesParameter())
    with pytest.raises(CaptureError, match="changes a parameter in place"):
        captured(model)


class WritesAttribute(Calls):
    def __init__(self) -> None:
        super().__init__(adds)
        self.part = Calls(adds)
        self.bank = torch.zeros(3)

    def forward(self, *args: Tensor) -> Any:
        return args[0] + self.part(self.bank)


def test_a_plain_attribute_that_is_changed_is_refused() -> None:
    with pytest.raises(CaptureError, match="keeps tensors for the next call"):
        captured(nn.Sequential(nn.Linear(3, 3), WritesAttribute()))


# Other threads of the script, which load and change data


def in_thread(run: Callable[[], Any]) -> Any:
    """What a function gives, or raises, in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@pytest.mark.parametrize("draw", ["random.random()", "random.sample(range(9), 3)", "np.random.rand(3)"])
def test_other_threads_draw_while_a_model_is_captured(draw: str) -> None:
    other = nn.Sequential(nn.Linear(3, 3))

    def draws_and_computes() -> Any:
        return eval(draw), other(torch.randn(2, 3))  # looks the function up, as scripts do

    def run(self: Any, x: Tensor) -> Tensor:
        in_thread(draws_and_computes)
        return self.other(x)

    found = captured(model_of(run))
    assert not found.kept_whole
    assert not any("ThreadPool" in str(found.place(op)) for op in range(len(found.op_nodes)))


def test_a_default_generator_of_another_thread_is_not_the_models() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        in_thread(lambda: np.random.default_rng().random())
        return self.other(x)

    assert not captured(model_of(run)).kept_whole


def test_backwards_of_attention_draw_what_their_forwards_have_drawn() -> None:
    graph, aten = fx.Graph(), torch.ops.aten
    q, k, v, grad = (graph.placeholder(name) for name in "qkvg")
    forward = graph.call_function(
        aten._scaled_dot_product_efficient_attention.default, (q, k, v, None, True), {"dropout_p": 0.1}
    )
    out, logsumexp, seed, offset = (graph.call_function(getitem, (forward, place)) for place in range(4))
    backward = graph.call_function(
        aten._scaled_dot_product_efficient_attention_backward.default,
        (grad, q, k, v, None, out, logsumexp, seed, offset, 0.1, [True, True, True, False]),
    )
    assert draws_random_numbers(forward)
    assert not draws_random_numbers(backward)
