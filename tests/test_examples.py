"""The examples, started as their users start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = Path(sys.executable).parent
TIMEOUT_S = 240

TORCHRUN = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node"]
MPIRUN = [str(PROGRAMS / "mpirun"), "--oversubscribe", "-np"]


def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command on processor cores, without configuration other than ``variables``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RANNC_")}
    environment = {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **variables,
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """The losses that an example printed, which must be those of one rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    found = [re.fullmatch(r"step (\d+): loss (\d+\.\d+)", line) for line in lines]
    assert all(found), done.stdout
    assert [match[1] for match in found if match] == [str(step) for step in range(len(lines))]
    return [float(match[2]) for match in found if match]


def tutorial(*launcher: str, **variables: str) -> list[float]:
    return losses(start(*launcher, str(EXAMPLES / "tutorial.py"), "8", "32", "4", "--steps", "3", **variables))


@pytest.fixture(scope="module")
def torchrun_losses() -> list[float]:
    return tutorial(*TORCHRUN, "2")


def test_the_tutorial_trains_under_torchrun(torchrun_losses: list[float]) -> None:
    assert len(torchrun_losses) == 3
    assert torchrun_losses == sorted(torchrun_losses, reverse=True)
    assert torchrun_losses[0] > torchrun_losses[-1]


def test_the_tutorial_trains_the_same_under_mpirun(torchrun_losses: list[float]) -> None:
    assert tutorial(*MPIRUN, "2", sys.executable) == torchrun_losses


def test_the_tutorial_trains_the_same_in_two_stages(torchrun_losses: list[float]) -> None:
    assert tutorial(*TORCHRUN, "2", RANNC_PARTITION_NUM="2") == pytest.approx(torchrun_losses, abs=2e-6)


def test_the_tutorial_runs_without_a_launcher() -> None:
    assert len(tutorial(sys.executable)) == 3


def pretrain(*launcher: str, **variables: str) -> list[float]:
    words = ["--model", "unet3d", "--batch", "4", "--steps", "2"]
    return losses(start(*launcher, str(EXAMPLES / "pretrain.py"), *words, **variables))


@pytest.fixture(scope="module")
def one_process_losses() -> list[float]:
    return pretrain(sys.executable)


@pytest.mark.parametrize("launcher", [[*TORCHRUN, "2"], [*MPIRUN, "2", sys.executable]], ids=["torchrun", "mpirun"])
def test_a_family_trains_the_same_under_any_launcher(launcher: list[str], one_process_losses: list[float]) -> None:
    assert len(one_process_losses) == 2
    assert pretrain(*launcher, RANNC_PARTITION_NUM="2") == pytest.approx(one_process_losses, abs=2e-6)


BERT = str(EXAMPLES / "bert_pretraining.py")
SMALL_BERT = ["--steps", "2", "--layers", "2", "--hidden", "128", "--batch-per-rank", "2", "--sequence-length", "32"]


def test_bert_in_several_stages_agrees_with_one_process() -> None:
    done = start(*TORCHRUN, "4", BERT, *SMALL_BERT)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = re.search(r"Plan of \S*BertForPreTraining: (\d+) stages on 4\s+ranks", done.stderr)
    assert stages, done.stderr
    assert int(stages[1]) > 1
    for what in ("loss", "parameter"):
        difference = re.search(rf"Largest difference of a {what}: (\S+)", done.stdout)
        assert difference, done.stdout
        assert float(difference[1]) < 1e-5
    assert done.stdout.count("The runs agree.") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "100"], "--hidden must be a multiple of 64, not 100"),
        (["--steps", "0"], "--steps, --layers and --batch-per-rank must be at least 1"),
        (["--sequence-length", "4"], "--sequence-length must be at least 16"),
    ],
)
def test_bert_names_a_wrong_argument(arguments: list[str], message: str) -> None:
    done = start(sys.executable, BERT, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
