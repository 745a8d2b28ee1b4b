"""Training and evaluation mode, dropout, and inputs of several shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

from .equivalence import Case, Differences, Twins, double_precision, local_slice, make_batch, make_model
from .models import RECIPES, VOCABULARY, WIDTH
from .plans import cut_plan, graph_of, possible_cuts

Ranks = Callable[[int], RankPool]


def train_and_evaluate(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        module, plain = twins.module, twins.reference.model
        for step in range(4):
            twins.step(step)
            module.eval()
            plain.eval()
            batch = make_batch(twins.recipe, case.total_rows, 100 + step)
            args, kwargs, _ = twins.local(batch)
            with torch.no_grad() if step % 2 else torch.enable_grad():
                output = module(*args, **kwargs)
                expected = plain(*batch[0], **batch[1])
            twins.compare_outputs(f"evaluation after step {step}", output, expected)
            module.train()
            plain.train()
        twins.compare_state("after evaluations")
        module.undeploy()
        return twins.differences.found


@pytest.mark.parametrize(
    "case",
    [
        Case("conv_net", (3, 3, 4, 2), replicas=(2, 2), microbatches=2, optimizer="sgd"),
        Case("bert", (2, 1, 3), replicas=(2, 1), microbatches=2),
        Case("dict_output", (1, 0, 3), stages=3, microbatches=2),
        Case("loss_inside", (4, 2), stages=2, microbatches=2),
        Case("parametrized", (1, 4), stages=2, microbatches=3),
    ],
    ids=str,
)
def test_evaluation_equals_the_plain_model(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(len(case.rows)).run(train_and_evaluate, case, str(tmp_path)) == [[] for _ in case.rows]


class Masked(nn.Module):
    """Layers of attention, each with a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        for number in range(2):
            self.register_buffer(f"mask{number}", torch.ones(WIDTH, WIDTH).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        for number, layer in enumerate(self.layers):
            mixed = layer(x)
            mask = getattr(self, f"mask{number}")[:length, :length]
            scores = (mixed @ mixed.transpose(1, 2)).masked_fill(~mask, float("-inf"))
            x = x + scores.softmax(2) @ mixed
        return x


def evaluate_after_a_cut_before_a_mask(folder: str) -> list[str]:
    with double_precision():
        differences, x = Differences(), torch.randn(4, 5, WIDTH, generator=Generator().manual_seed(0))
        own = local_slice((1, 3))
        torch.manual_seed(0)
        plain = Masked()
        file = Path(folder) / "plan.json"
        if process.get_rank() == 0:
            # The second layer's mask comes after the cut, and so do its scores.
            cut_plan(graph_of(plain, (x,), {}, len(x)), [9], [[0], [1]], 2).write(file)
        module = pyrannc.RaNNCModule(copy.deepcopy(plain), load_deployment=file)
        for each, rows in ((module, x[own]), (plain, x)):
            each(rows).square().mean().backward()
        for name, param in plain.named_parameters():
            differences.compare(f"gradient of {name}", module.get_param_grad(name), param.grad)
        module.eval()
        plain.eval()
        with torch.no_grad():
            differences.compare("evaluation", module(x[own]), plain(x)[own])
        module.undeploy()
        return differences.found


def test_buffers_stay_where_they_are_for_evaluation(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(evaluate_after_a_cut_before_a_mask, str(tmp_path)) == [[], []]


def evaluate_first(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        twins.module.eval()
        twins.reference.model.eval()
        for seed in range(2):
            batch = make_batch(twins.recipe, case.total_rows, seed)
            with torch.no_grad():
                output = twins.module(*twins.local(batch)[0])
                twins.compare_outputs("evaluation", output, twins.reference.model(*batch[0]))
        twins.module.train()
        twins.reference.model.train()
        for step in range(2):
            twins.step(step)
        twins.compare_state("after training")
        twins.module.undeploy()
        return twins.differences.found


@pytest.mark.parametrize(
    "case",
    [
        Case("conv_net", (3, 3), stages=2, optimizer="sgd"),
        Case("chain", (3, 1), stages=2, microbatches=3),
    ],
    ids=str,
)
def test_deployed_in_evaluation_mode(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(evaluate_first, case, str(tmp_path)) == [[], []]


def dropout_switched(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        module, differences = twins.module, twins.differences
        module.enable_dropout(False)
        twins.reference.model.eval()
        twins.step(0)
        batch = make_batch(twins.recipe, case.total_rows, 1)
        args, _, _ = twins.local(batch)
        expected = twins.reference.model(*batch[0])
        module.enable_dropout(True)
        first, second = module(*args), module(*args)
        whole = expected[local_slice(case.rows)]
        differences.demand(not torch.allclose(first, whole), "dropout changes the output")
        differences.demand(not torch.allclose(first, second), "dropout is drawn anew in each call")
        module.eval()
        twins.compare_outputs("evaluation", module(*args), expected)
        module.undeploy()
        return differences.found


def test_enable_dropout(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("dropout", (4, 3), stages=2, microbatches=2)
    assert ranks(2).run(dropout_switched, case, str(tmp_path)) == [[], []]


def train_with_dropout(cut_numbers: Sequence[int], members: Sequence[Sequence[int]], folder: str) -> dict[str, Any]:
    """Two steps on one batch; returns outputs and gradients, which are the same on all ranks."""
    with double_precision():
        recipe = RECIPES["dropout"]
        model = make_model(recipe)
        args, _, target = make_batch(recipe, 7, 0)
        file = Path(folder) / "plan.json"
        if process.get_rank() == 0:
            graph = graph_of(model, args, {}, 7)
            cuts = possible_cuts(graph)
            cut_plan(graph, [cuts[number] for number in cut_numbers], members, 3).write(file)
        module = pyrannc.RaNNCModule(model, gather_inputs=False, load_deployment=file)
        torch.manual_seed(5)
        outputs = []
        for _ in range(2):
            outputs.append(module(*args))
            recipe.criterion(outputs[-1], target).backward()
        grads = {name: module.get_param_grad(name) for name in module.name_to_param}
        module.undeploy()
        return {"outputs": [output.detach() for output in outputs], **grads}


def test_dropout_is_the_same_for_all_cuts_and_replicas(ranks: Ranks, tmp_path: Path) -> None:
    def trained(cuts: list[int], members: list[list[int]]) -> list[dict[str, Any]]:
        world_size = sum(map(len, members))
        found: list[dict[str, Any]] = ranks(world_size).run(train_with_dropout, cuts, members, str(tmp_path))
        return found

    (alone,) = trained([], [[0]])
    first, second = alone["outputs"]
    assert not torch.allclose(first, second)
    for cuts, members in [
        ([2], [[0], [1]]),
        ([5], [[1], [0]]),
        ([], [[0, 1]]),
        ([1, 4, 6], [[0], [1], [2], [3]]),
        ([2], [[0, 1], [2, 3]]),
        ([6], [[3, 0], [1, 2]]),
    ]:
        for found in trained(cuts, members):
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def sequence_lengths(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        for step, length in enumerate([8, 5, 8, 3]):
            generator = Generator().manual_seed(step)
            tokens = torch.randint(0, VOCABULARY, (case.total_rows, length), generator=generator)
            rows = local_slice(case.rows)
            mine = twins.module(input_ids=tokens[rows])
            right = twins.reference.model(input_ids=tokens)
            twins.compare_outputs(f"length {length}", mine, right)
            _mean_square(mine.logits).backward()
            _mean_square(right.logits).backward()
            twins.compare_gradients(f"length {length}")
        twins.module.undeploy()
        return twins.differences.found


def _mean_square(logits: Tensor) -> Tensor:
    return logits.square().mean()


def test_several_sequence_lengths(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("gpt2", (2, 1, 2), replicas=(2, 1), microbatches=2)
    assert ranks(3).run(sequence_lengths, case, str(tmp_path)) == [[], [], []]


def row_counts(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        for step, rows in enumerate([(3, 2, 2), (1, 1, 1), (0, 9, 0), (8, 0, 1)]):
            twins.case = replace(case, rows=rows)
            twins.step(step)
        twins.compare_state("after all batches")
        twins.module.undeploy()
        return twins.differences.found


def test_rows_change_from_call_to_call(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("embedding", (3, 2, 2), replicas=(1, 2), microbatches=3)
    assert ranks(3).run(row_counts, case, str(tmp_path)) == [[], [], []]


def frozen_and_unused(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        module = twins.module
        for step in range(2):
            twins.step(step)
            frozen = ["layers.0.weight", "layers.0.bias", "layers.2.weight", "unused.weight", "unused.bias"]
            for name in frozen:
                twins.differences.demand(module.name_to_param[name].grad is None, f"{name} has no gradient")
        unused = {name for name, param in module.name_to_param.items() if id(param) not in module.used_param_ids}
        twins.differences.compare("unused", unused, {"unused.weight", "unused.bias"})
        twins.compare_state("after training")
        module.undeploy()
        return twins.differences.found


def test_frozen_and_unused_parameters(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("frozen", (2, 3, 1), replicas=(2, 1), microbatches=2, optimizer="adamw")
    assert ranks(3).run(frozen_and_unused, case, str(tmp_path)) == [[], [], []]
