"""``python -m pyrannc zoo`` on a few models, some of which no graph holds as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from pyrannc.zoo.case import Case, NotByRuleError
from pyrannc.zoo.command import Results, main, table
from pyrannc.zoo.command import _shard as shard
from pyrannc.zoo.trial import Outcome

SAMPLE = {
    "transformers/gpt2.GPT2LMHeadModel": "cut",
    "transformers/ibert.IBertForMaskedLM": "in tail",
    "transformers/mixtral.MixtralForCausalLM": "in leaves",
    "transformers/wav2vec2.Wav2Vec2ForCTC": "cut",
    "torchvision/resnet18": "cut",
    "torchvision/fasterrcnn_mobilenet_v3_large_fpn": "refused",
}


@pytest.mark.timeout(600)
def test_a_sample_trains_as_in_one_process(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    only = f"^({'|'.join(SAMPLE)})$"
    command = [sys.executable, "-m", "pyrannc", "zoo", "--only", only, "--results", str(results)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580)
    found = {f"{item['library']}/{item['name']}": item["column"] for item in map(json.loads, results.open())}
    assert found == SAMPLE, ended.stdout
    assert ended.returncode == 0, ended.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"{len(SAMPLE)} models, {len(SAMPLE)} of them known" in again.stdout
    assert "torchvision/fasterrcnn" in again.stdout[again.stdout.index("refused:") :]


def unused(rows: int) -> Any:
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


def test_status_tells_of_wrong_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.jsonl"
    case = Case("torchvision", "resnet", "resnet18", unused)
    Results(file).add(case, Outcome("wrong", "it differs"), 1.0)
    assert main(["--library", "torchvision", "--only", "/resnet18$", "--results", str(file)]) == 1
    assert "it differs" in capsys.readouterr().out
