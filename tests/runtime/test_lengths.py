"""Lengths that change from step to step: equal to one process, and traced no more often than the model needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import pyrannc
from pyrannc._native import Plan
from pyrannc.runtime import compiling
from tests.ranks import RankPool

from .equivalence import Differences, double_precision, environment, local_slice

Ranks = Callable[[int], RankPool]
WIDTH, WORDS, MOST = 4, 11, 40
ROWS = (3, 2)
LENGTHS = (6, 9, 12, 7, 9, 20, 31, 6)


class Mixing(nn.Module):
    """Embeds words, lets those of a row mix, and gives a number for each row; ``work`` is told the length."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(MOST, WIDTH)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("table", torch.randn(MOST, WIDTH))
        self.work = work

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embedding(words)))
        return self.last(self.work(self, x).sum(1)).squeeze(-1)  # type: ignore[no-any-return]


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def causal(model: Any, x: Tensor) -> Tensor:
    hidden = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
    return (x @ x.transpose(1, 2)).masked_fill(hidden, -1e9).softmax(-1) @ x


def merged(model: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    return model.first(flat).view(x.shape[0], x.shape[1], WIDTH)  # type: ignore[no-any-return]


def numbered(model: Any, x: Tensor) -> Tensor:
    return x + model.positions(torch.arange(x.shape[1]))  # type: ignore[no-any-return]


def by_type(model: Any, x: Tensor) -> Tensor:
    """For lengths above 16 a symbol takes the other way, though nothing asks it how long it is."""
    return x * 2 if isinstance(x.shape[1], int) and x.shape[1] > 16 else x


WORK: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda model, x: x.square(),
    "a branch": lambda model, x: x * 2 if x.shape[1] > 16 else x + 1,
    "positions": lambda model, x: x + model.table[: x.shape[1]],
    "numbered": numbered,
    "causal": causal,
    "merged": merged,
    "a reciprocal": lambda model, x: x * (1 / x.shape[1]),
    "a plain number": lambda model, x: x / int(x.shape[1]),
    "a loop": lambda model, x: torch.stack([x[:, i] * i for i in range(x.shape[1])], 1),
    "a function": lambda model, x: Doubled.apply(x),
    "data": lambda model, x: x * 2 if bool((x.detach() < 2).all()) else x,
    "a type": by_type,
}
TRACES = {"a branch": 2, "a plain number": 6, "a loop": 6, "a function": 6, "data": 6, "a type": 3}
"""Of the calls that were traced for themselves; one, where it is not said. There are six lengths."""


def steps(model: nn.Module, batches: Sequence[tuple[Any, ...]], rows: tuple[int, ...], stages: int) -> list[str]:
    with double_precision():
        differences = Differences()
        plain = model.double()
        model = copy.deepcopy(plain)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.001) for each in (model, plain)]
        with environment({"RANNC_PARTITION_NUM": str(stages)}):
            module = pyrannc.RaNNCModule(model, optimizers[0], batch_arguments=list(range(len(batches[0]))))
        own = local_slice(rows)
        for number, batch in enumerate(batches):
            for optimizer in optimizers:
                optimizer.zero_grad()
            output, expected = module(*(item[own] for item in batch)), plain(*batch)
            differences.compare(f"output {number}", output, expected[own])
            output.square().mean().backward()
            expected.square().mean().backward()
            for name, param in plain.named_parameters():
                differences.compare(f"gradient of {name} {number}", module.get_param_grad(name), param.grad)
            for optimizer in optimizers:
                optimizer.step()
        found = [*differences.found, f"{module._variants.traced} traces of {module._variants.made}"]
        module.undeploy()
        return found


def of_words(work: str, rows: tuple[int, ...], stages: int) -> list[str]:
    torch.manual_seed(0)
    batches = [(torch.randint(0, WORDS, (sum(rows), length)),) for length in LENGTHS]
    return steps(Mixing(WORK[work]), batches, rows, stages)


@pytest.mark.parametrize("work", WORK)
def test_one_process(work: str, ranks: Ranks) -> None:
    traced = TRACES.get(work, 1)
    assert ranks(1).run(of_words, work, (5,), 1) == [[f"{traced} traces of 6"]]


@pytest.mark.parametrize("work", ["a branch", "causal", "merged", "a plain number"])
@pytest.mark.parametrize("stages", [1, 2])
def test_two_processes(work: str, stages: int, ranks: Ranks) -> None:
    traced = TRACES.get(work, 1)
    assert ranks(2).run(of_words, work, ROWS, stages) == [[f"{traced} traces of 6"]] * 2


def of_encoder(rows: tuple[int, ...]) -> list[str]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=WORDS,
        max_position_embeddings=MOST, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batches = []
    for length in LENGTHS:
        words = torch.randint(0, WORDS, (sum(rows), length))
        batches.append((words, (torch.rand(words.shape) < 0.8).long()))
    return steps(Of(BertForMaskedLM(config)), batches, rows, 1)


def of_two_lengths(rows: tuple[int, ...]) -> list[str]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=WIDTH, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=WORDS, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    batches = []
    for source, target in ((6, 9), (9, 7), (7, 7), (12, 5), (12, 8), (6, 9)):
        words, others = (torch.randint(0, WORDS, (sum(rows), length)) for length in (source, target))
        batches.append((words, (torch.rand(words.shape) < 0.8).long(), others))
    return steps(Of(T5ForConditionalGeneration(config)), batches, rows, 1)


class Of(nn.Module):
    """A model of transformers, of which only the logits are looked at."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, mask: Tensor, others: Tensor | None = None) -> Tensor:
        more = {} if others is None else {"decoder_input_ids": others}
        return self.model(input_ids=words, attention_mask=mask, **more).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [(5,), ROWS], ids=str)
@pytest.mark.parametrize("job", [of_encoder, of_two_lengths])
def test_transformers(job: Callable[..., list[str]], rows: tuple[int, ...], ranks: Ranks) -> None:
    made = 6 if job is of_encoder else 5
    assert ranks(len(rows)).run(job, rows) == [[f"1 traces of {made}"]] * len(rows)


def in_evaluation() -> list[str]:
    with double_precision():
        model = Mixing(WORK["a type"])
        module = pyrannc.RaNNCModule(copy.deepcopy(model).eval())
        found = []
        for length in (6, 9, 20):
            words = torch.randint(0, WORDS, (5, length))
            with torch.no_grad():
                found.append(str(torch.equal(module(words), model(words))))
        found.append(f"{module._variants.traced} traces")
        module.undeploy()
        return found


def test_evaluation_is_compared_too(ranks: Ranks) -> None:
    """What no trace of its own has shown might be wrong for one length alone."""
    assert ranks(1).run(in_evaluation) == [["True"] * 3 + ["2 traces"]]


def compiled_forms(folder: str) -> tuple[list[str], int]:
    compiling._MOST_FORMS = 2
    with environment({"RANNC_COMPILE_SPANS": "on", "RANNC_PROFILE_CACHE_DIR": folder}), double_precision():
        module = pyrannc.RaNNCModule(model := Mixing(WORK["plain"]))
        plain, found = copy.deepcopy(model), []
        for length in (6, 6, 9, 9, 12, 12, 7, 7):
            words = torch.randint(0, WORDS, (5, length))
            module(words).square().mean().backward()
            plain(words).square().mean().backward()
            found += [
                name
                for name, param in plain.named_parameters()
                if param.grad is not None and not torch.allclose(module.get_param_grad(name), param.grad, rtol=1e-9)  # type: ignore[arg-type]
            ]
        return found, taken_forms(module)


def taken_forms(module: pyrannc.RaNNCModule) -> int:
    """How many kinds of calls are compiled, at the end."""
    deployment = module._deployment
    assert deployment is not None
    assert deployment.compiling is not None
    forms = len(deployment.compiling._forms)
    module.undeploy()
    return forms


def forms_under(budget: int | None, folder: str) -> int:
    """How many kinds of calls are compiled under a Plan with a memory budget, of three that come once."""
    compiling._MOST_FORMS = 1
    file = Path(folder) / "plan.json"
    found = {"RANNC_COMPILE_SPANS": "on", "RANNC_PROFILE_CACHE_DIR": folder, "RANNC_DEPLOYMENT_FILE": str(file)}
    with environment({**found, "RANNC_SAVE_DEPLOYMENT": "1"}):
        module = pyrannc.RaNNCModule(Mixing(WORK["plain"]))
        module(torch.randint(0, WORDS, (5, 6))).square().mean().backward()
        module.undeploy()
    Plan.seal(json.dumps({**json.loads(file.read_text()), "memory_budget_percent": budget})).write(str(file))
    with environment({**found, "RANNC_LOAD_DEPLOYMENT": "1"}):
        module = pyrannc.RaNNCModule(Mixing(WORK["plain"]))
        for length in (6, 9, 12):
            module(torch.randint(0, WORDS, (5, length))).square().mean().backward()
        return taken_forms(module)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("budget", "forms"), [(None, 1), (80, 3)])
def test_what_a_memory_budget_counts_on_is_compiled_at_once(
    ranks: Ranks, tmp_path: Path, budget: int | None, forms: int
) -> None:
    assert ranks(1).run(forms_under, budget, str(tmp_path), timeout_s=280) == [forms]


@pytest.mark.timeout(300)
def test_few_lengths_are_compiled(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(compiled_forms, str(tmp_path), timeout_s=280) == [([], 2)]
