"""The families of ``examples/pretrain.py``: trained in two Stages beside one process, and full sizes planned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pretrain
import pytest
import torch
from families import FULL, TINY
from pretrain import LEARNING_RATE, Settings, make_batch, make_model, parse_arguments

from tests.ranks import RankPool, run_ranks

SCRIPT = Path(pretrain.__file__)
EXACT = 1e-10
IN_FLOAT32 = 1e-6
"""For losses that transformers computes in float32 whatever the model's type."""
LOSS_IN_FLOAT32 = ("electra", "gpt2", "llama", "mixtral", "mamba")
TWO_STAGES = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}
# BatchNorm takes its statistics over a microbatch.
ONE_MICROBATCH = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "1"}


def settings_of(model: str) -> Settings:
    # Torch has no grouped products in float64.
    dtype = "float32" if model == "mixtral" else "float64"
    return parse_arguments(["--model", model, "--batch", "4", "--steps", "2", "--dtype", dtype])


def train(model: str) -> list[float]:
    """Runs on each rank."""
    try:
        return pretrain.train(settings_of(model))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("model", TINY)
def test_a_family_in_two_stages_agrees_with_one_process(model: str, ranks: RankPool) -> None:
    # What ELECTRA draws inside is drawn otherwise without RaNNC.
    (alone,) = run_ranks(1, train, model) if model == "electra" else (train_plain(settings_of(model)),)
    tolerance = IN_FLOAT32 if model in LOSS_IN_FLOAT32 else EXACT
    together = ranks.run(train, model, env=ONE_MICROBATCH if model == "resnet" else TWO_STAGES)
    assert together == [pytest.approx(alone, rel=tolerance)] * 2
    assert abs(alone[0] - alone[1]) > 1e-4


def train_plain(settings: Settings) -> list[float]:
    """The same steps without RaNNC, on the whole batch."""
    net = make_model(settings)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(settings.steps):
        optimizer.zero_grad()
        first = step * settings.batch
        loss = net(**make_batch(settings, list(range(first, first + settings.batch))))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_both_networks_of_electra_have_the_same_embeddings() -> None:
    names = [name for name, _ in TINY["electra"].model().named_parameters(remove_duplicate=False)]
    assert len(names) == len(set(names))
    net = TINY["electra"].model()
    embeddings = net.get_parameter("discriminator.electra.embeddings.word_embeddings.weight")
    assert net.get_parameter("generator.electra.embeddings.word_embeddings.weight") is embeddings
    assert net.get_parameter("generator.generator_lm_head.weight") is embeddings


PARAMETERS = {
    "bert-4.9b": 4.9e9,
    "bert-100b": 101.1e9,
    "t5-3b": 2.85e9,
    "resnet-50": 25.6e6,
    "resnet-152": 60.2e6,
    "resnet-152x8": 3.7e9,
    "albert-xxlarge": 223e6,
    "deberta-xxlarge": 1.57e9,
    "gpt2-xl": 1.56e9,
    "llama-8b": 8.03e9,
    "mixtral-8x7b": 46.7e9,
    "vit-huge": 632e6,
    "whisper-large": 1.54e9,
    "mamba-2.8b": 2.77e9,
}


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_full_size_has_as_many_parameters_as_is_told_of_it(model: str) -> None:
    with torch.device("meta"):
        parameters = sum(param.numel() for param in FULL[model].model().parameters())
    assert parameters == pytest.approx(PARAMETERS[model], rel=0.02)


def test_a_full_size_is_planned_for_two_clusters(tmp_path: Path) -> None:
    graph = tmp_path / "graph.json"
    capture = ("capture", "--autocast", "float16", f"{SCRIPT}:example", "-o", graph)
    captured = rannc(*capture, "--", "--model", "bert-4.9b", "--layers", "2")
    assert "Captured BertForPreTraining" in captured
    assert '"float16"' in graph.read_text()
    planned = rannc("plan", graph, "--cluster", "V100x8x4", "--cluster", "H200x8", "--batch", "256")
    assert "4 x 8 V100" in planned
    assert "1 x 8 H200" in planned


def rannc(*command: object) -> str:
    words = [sys.executable, "-m", "pyrannc", *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "resnet", "--hidden", "64"],
            "resnet has no hidden; it has pixels=32 classes=10 layers=14 width=1",
        ),
        (["--model", "resnet", "--layers", "20"], "a ResNet has 14, 50, 101, 152 layers, not 20"),
        (["--model", "bert-5b"], "invalid choice: 'bert-5b'"),
        (["--model", "bert", "--batch", "0"], "--batch must be at least 1, the number of processes"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
