"""``python -m pyrannc zoo`` on some twenty models, some of which no graph holds as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pyrannc.zoo.case import Case, NotByRuleError, moved
from pyrannc.zoo.command import Results, hold, main, table
from pyrannc.zoo.command import _count as count
from pyrannc.zoo.command import _shard as shard
from pyrannc.zoo.trial import BY_ROUNDING, Outcome

CUT = (
    "transformers/bert.BertLMHeadModel",
    "transformers/clip.CLIPForImageClassification",
    "transformers/deberta.DebertaForMaskedLM",
    "transformers/fnet.FNetForMaskedLM",
    "transformers/gpt2.GPT2LMHeadModel",
    "transformers/llama.LlamaForCausalLM",
    "transformers/mamba.MambaForCausalLM",
    "transformers/t5.T5ForConditionalGeneration",
    "transformers/wav2vec2.Wav2Vec2ForCTC",
    "transformers/whisper.WhisperForCausalLM",
    "transformers/xlnet.XLNetLMHeadModel",
    "timm/test_byobnet",
    "timm/test_efficientnet",
    "timm/test_nfnet",
    "timm/test_resnet",
    "timm/test_vit",
    "diffusers/AutoencoderKL",
    "torchaudio/Wav2Vec2",
    "torchvision/squeezenet1_0",
)
"""Quick ones of each kind of design; `pyrannc zoo` tries all that the libraries have."""
OTHERS = {
    "transformers/ibert.IBertForMaskedLM": "in tail",
    "transformers/mixtral.MixtralForCausalLM": "in leaves",
    "transformers/pixtral.PixtralVisionModel": "uncut",
}
SAMPLE = dict.fromkeys(CUT, "cut") | OTHERS


@pytest.mark.timeout(600)
def test_a_sample_trains_as_in_one_process(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    only = f"^({'|'.join(SAMPLE)})$"
    command = [sys.executable, "-m", "pyrannc", "zoo", "--only", only, "--jobs", "2", "--results", str(results)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580)
    found = {f"{item['library']}/{item['name']}": item["column"] for item in map(json.loads, results.open())}
    assert found == SAMPLE, ended.stdout
    assert ended.returncode == 0, ended.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"{len(SAMPLE)} models, {len(SAMPLE)} of them known" in again.stdout
    assert "transformers/pixtral" in again.stdout[again.stdout.index("uncut:") :]


def unused(rows: int, as_they_are: bool) -> Any:
    raise NotByRuleError("never made")


def test_results_are_taken_up_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    case = Case("timm", "vgg", "vgg11", unused)
    Results(file).add(case, Outcome("wrong", "it differs"), 1.0)
    found = Results(file).found
    assert found["timm/vgg11"]["column"] == "wrong"
    assert "timm/vgg11: it differs" in table([*found.values()])


def test_shards() -> None:
    assert shard("1/3") == (1, 3)
    for text in ("3/3", "1", "a/b"):
        with pytest.raises(ArgumentTypeError):
            shard(text)


def test_counts_of_jobs() -> None:
    assert count("16") == 16
    for text in ("0", "-1", "many"):
        with pytest.raises(ArgumentTypeError):
            count(text)


def test_status_tells_of_wrong_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.jsonl"
    case = Case("torchvision", "resnet", "resnet18", unused)
    Results(file).add(case, Outcome("wrong", "it differs"), 1.0)
    assert main(["--library", "torchvision", "--only", "/resnet18$", "--results", str(file)]) == 1
    assert "it differs" in capsys.readouterr().out


def test_moved_parameters_are_the_same_each_time() -> None:
    case = moved(Case("timm", "vgg", "vgg11", lambda rows, _: (nn.LayerNorm(3), {"input": torch.ones(rows, 3)})))
    model, arguments = case.make(2, False)
    again, _ = case.make(2, False)
    assert arguments["input"].shape == (2, 3)
    assert torch.equal(model.weight, again.weight)
    assert 0 < float((model.weight.detach() - 1).abs().max()) < 0.2
    assert model.weight.unique().numel() == 3


def test_where_a_rounding_decides_parameters_are_moved() -> None:
    class Ranks:
        def hold(self, library: str, name: str, timeout_s: float, *, is_moved: bool = False) -> Outcome:
            return Outcome("cut", stages=2) if is_moved else Outcome("chance", causes[name])

    causes = {"ties": f"{BY_ROUNDING} (aten.topk)", "draws": "it draws random numbers (aten.rand)"}
    ranks: Any = Ranks()
    found = {name: hold(Case("timm", "vgg", name, unused), ranks, ranks, 1.0) for name in causes}
    assert (found["ties"].column, found["ties"].why) == ("cut", "with its parameters moved.")
    assert found["draws"].column == "chance"
