"""Mixed precision by ranks is as near to exact numbers as in one process, and the same kernels give the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Adam

import pyrannc
from pyrannc._native import Plan
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode
from tests.ranks import RankPool

from .equivalence import environment
from .plans import divided

WIDTH, ROWS, STEPS = 24, 24, 3
ATTEMPTS = 2
KINDS = ("autocast", "float16", "parameters")
PLANS = [
    # Stages, microbatches, rows of each rank
    (1, 1, (12, 12)),
    (1, 3, (16, 8)),
    (2, 2, (12, 12)),
    (2, 3, (20, 4)),
]


class Net(nn.Module):
    """Linear layers, norms, a tied weight, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return F.cross_entropy(self.head(x), labels)


@dataclass(frozen=True)
class Kind:
    """How a step is computed: in which types, and with which scale of the loss."""

    name: str

    @property
    def of_params(self) -> torch.dtype:
        return {"parameters": torch.bfloat16, "exact": torch.float64}.get(self.name, torch.float32)

    @contextmanager
    def region(self) -> Iterator[None]:
        dtype = torch.float16 if self.name == "float16" else torch.bfloat16
        with torch.autocast("cpu", dtype=dtype, enabled=self.name in ("autocast", "float16")):
            yield

    @property
    def scale(self) -> float:
        return 2.0**12 if self.name == "float16" else 1.0


def net_of(kind: Kind, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().to(kind.of_params)


def batch_of(kind: Kind, seed: int) -> tuple[Tensor, Tensor]:
    generator = Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x.to(kind.of_params), torch.randint(0, WIDTH, (ROWS,), generator=generator)


def own(batch: tuple[Tensor, ...], rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    rank = pyrannc.get_rank()
    return tuple(part[sum(rows[:rank]) : sum(rows[: rank + 1])] for part in batch)


def gradients(kind: Kind, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Of the loss, and the loss."""
    with kind.region():
        loss = model(*batch)
    (loss * kind.scale).backward()
    if isinstance(model, pyrannc.RaNNCModule):
        named = {name: model.get_param_grad(name) for name, _ in model.named_parameters(from_global=True)}
    else:
        named = {name: param.grad for name, param in model.named_parameters()}
    found = {name: grad.clone() / kind.scale for name, grad in named.items()}
    model.zero_grad()
    return {**found, "loss": loss.detach()}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all gradients together, relative."""
    off = sum((found[name].double() - exact[name]).square().sum() for name in exact if name != "loss")
    size = sum(exact[name].square().sum() for name in exact if name != "loss")
    return float((off / size).sqrt())


def compare(kind: Kind, stages: int, microbatches: int, rows: tuple[int, ...], dtype: str) -> list[str]:
    """What is wrong with some gradients under a Plan."""
    wrong = []
    plan = {
        "RANNC_PARTITION_NUM": str(stages),
        "RANNC_PIPELINE_NUM": str(microbatches),
        "RANNC_REDUCE_DTYPE": dtype,
    }
    mine, plains = [], []
    for seed in range(ATTEMPTS):
        with environment(plan):
            module = pyrannc.RaNNCModule(net_of(kind, seed))
        batch = batch_of(kind, seed)
        found = gradients(kind, module, own(batch, rows))
        plain = gradients(kind, net_of(kind, seed), batch)
        exact = gradients(Kind("exact"), _as_exact(net_of(kind, seed)), (batch[0].double(), batch[1]))
        wrong += [f"{name} is {grad.dtype}" for name, grad in found.items() if grad.dtype != plain[name].dtype]
        mine.append(error(found, exact))
        plains.append(error(plain, exact))
        module.undeploy()
    # Messages in bfloat16 are rounded to 8 bits.
    allowed = 2.0 * sum(plains) + (0.005 * ATTEMPTS if dtype == "bfloat16" else 0.0)
    if sum(mine) > allowed:
        wrong.append(f"errors {mine}, those of one process {plains}")
    return [f"{kind.name}, {stages} Stages, {microbatches} microbatches, {dtype}: {text}" for text in wrong]


def _as_exact(net: Net) -> Net:
    return net.double()


def check(kinds: tuple[str, ...]) -> list[str]:
    found = []
    for name in kinds:
        for stages, microbatches, rows in PLANS:
            found += compare(Kind(name), stages, microbatches, rows, "float32")
        found += compare(Kind(name), *PLANS[1], "bfloat16")
        found += compare(Kind(name), *PLANS[0], "param")
    return found


def test_gradients_are_as_exact_as_in_one_process(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(check, KINDS, timeout_s=400) == [[], []]


def check_divided(sharding: str, folder: Path) -> list[str]:
    found = []
    for kind in map(Kind, ("autocast", "parameters")):
        stages, microbatches, rows = PLANS[1]
        file = folder / f"{kind.name}.json"
        with environment({"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": str(microbatches)}):
            module = pyrannc.RaNNCModule(net_of(kind, 0))
        gradients(kind, module, own(batch_of(kind, 0), rows))
        if pyrannc.get_rank() == 0:
            divided(Plan.from_json(json.dumps(module.plan)), sharding).write(file)
        module.undeploy()
        with environment({"RANNC_LOAD_DEPLOYMENT": "1", "RANNC_DEPLOYMENT_FILE": str(file)}):
            for dtype in ("bfloat16", "param"):
                found += compare(kind, stages, microbatches, rows, dtype)
    return found


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "params"])
def test_divided_gradients_are_as_exact_as_in_one_process(
    ranks: Callable[[int], RankPool], sharding: str, tmp_path: Path
) -> None:
    assert ranks(2).run(check_divided, sharding, tmp_path, timeout_s=400) == [[], []]


def check_bits() -> list[str]:
    wrong = []
    for kind in map(Kind, KINDS):
        with environment({"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "1"}):
            module = pyrannc.RaNNCModule(net_of(kind, 0))
        batch = batch_of(kind, 0)
        found, plain = gradients(kind, module, batch), gradients(kind, net_of(kind, 0), batch)
        # A mean in bfloat16 is a sum in float32 here, by the count.
        exactly = kind.name != "parameters"
        wrong += [f"{kind.name}: {name}" for name in plain if exactly and not torch.equal(found[name], plain[name])]
        module.undeploy()
    return wrong


def test_one_rank_and_one_microbatch_give_the_same_bits(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(check_bits, timeout_s=200) == [[]]


class Conversions(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Counts the conversions of matrices of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._to_copy.default and made.shape == (WIDTH, WIDTH)
        return made


def check_proof(stages: int, microbatches: int, rows: tuple[int, ...]) -> None:
    """A call under autocast that is compared with one process first."""
    kind = Kind("autocast")
    plan = {"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": str(microbatches)}
    with environment({**plan, "RANNC_VERIFY_PARTITIONING": "1"}):
        module = pyrannc.RaNNCModule(net_of(kind, 0))
    gradients(kind, module, own(batch_of(kind, 0), rows))
    module.undeploy()


def test_a_proof_allows_the_rounding_of_the_type_that_computes(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(check_proof, *PLANS[3])


def check_copies() -> int:
    """Conversions in a step of three microbatches, after one that has captured."""
    kind = Kind("autocast")
    with environment({"RANNC_PIPELINE_NUM": "3", "RANNC_RECAPTURE_INTERVAL": "0"}):
        module = pyrannc.RaNNCModule(net_of(kind, 0))
    gradients(kind, module, batch_of(kind, 0))
    x, labels = batch_of(kind, 1)
    with Conversions() as conversions:
        with kind.region():
            loss = module(x[:23], labels[:23])
        loss.backward()
    module.undeploy()
    return conversions.count


def test_parameters_are_converted_once_a_call_and_not_by_microbatch(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(check_copies) == [0]


def scaled_steps(module: bool, rows: tuple[int, ...], stages: int, microbatches: int) -> list[Any]:
    """Twenty steps in float16 with a scaler that grows often, and an overflow in the eighth."""
    kind = Kind("float16")
    net: nn.Module = net_of(kind, 0)
    optimizer = Adam(net.parameters(), lr=1e-3)
    if module:
        with environment({"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": str(microbatches)}):
            net = pyrannc.RaNNCModule(net, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
    told: list[Any] = []
    for step in range(20):
        x, labels = batch_of(kind, step)
        if step == 7:
            x = torch.where(torch.arange(ROWS)[:, None] == 1, x * 1e38, x)
        batch = own((x, labels), rows) if module else (x, labels)
        optimizer.zero_grad()
        with kind.region():
            loss = net(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if isinstance(net, pyrannc.RaNNCModule):
            norm = net.clip_grad_norm(0.5)
        else:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        told.append((scaler.get_scale(), float(norm), float(loss)))
    if isinstance(net, pyrannc.RaNNCModule):
        net.undeploy()
    return told


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[3]])
def test_a_scaler_grows_and_backs_off_as_in_one_process(
    ranks: Callable[[int], RankPool], plan: tuple[int, int, tuple[int, ...]]
) -> None:
    stages, microbatches, rows = plan
    expected = scaled_steps(False, rows, stages, microbatches)
    scales = [scale for scale, *_ in expected]
    assert any(after > before for before, after in pairwise(scales))
    assert any(after < before for before, after in pairwise(scales))
    for told in ranks(2).run(scaled_steps, True, rows, stages, microbatches):
        assert [scale for scale, *_ in told] == scales
        for (_, norm, loss), (_, right_norm, right_loss) in zip(told, expected, strict=True):
            assert norm == pytest.approx(right_norm, rel=0.01, nan_ok=True)
            assert loss == pytest.approx(right_loss, rel=0.01, nan_ok=True)
