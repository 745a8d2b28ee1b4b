"""BERT pre-training over several processes, compared with the same steps in one process.

    torchrun --nproc-per-node 4 examples/bert_pretraining.py

The model is transformers' BertForPreTraining with random weights, the text is the source code of Python's standard
library, the tokens are bytes. The memory limit is set so low that the model does not fit into one Stage. At the
end rank 0 repeats all steps with the plain model, alone on the whole batch, and prints the differences; the
program fails when they are larger than rounding explains.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

# A demonstration for processor cores. Give CUDA_VISIBLE_DEVICES and RANNC_MEM_LIMIT_GB to run it on GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

import pyrannc

CLS, SEP, MASK, PAD = range(256, 260)
VOCABULARY = 260
HEAD_WIDTH = 64
IGNORED = -100  # the label of tokens that are not predicted
MASKED_SHARE = 0.15
LEARNING_RATE = 5e-4

# Both runs add the same numbers in different orders. Measured differences are some hundred times smaller.
LOSS_TOLERANCE = 1e-4
PARAMETER_TOLERANCE = 1e-4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    steps: int
    layers: int
    hidden: int
    batch_per_rank: int
    sequence_length: int
    seed: int


@dataclass(frozen=True)
class Run:
    """What training has brought: the loss of each step, the final state, and the mean time of later steps."""

    losses: list[float]
    state: dict[str, Tensor]
    step_s: float


def main() -> int:
    settings = parse_arguments()
    rank, ranks = pyrannc.get_rank(), pyrannc.get_world_size()
    console = Console(quiet=rank != 0)
    torch.set_num_threads(1)  # in every process, so that four of them do not get into each other's way
    text, files = read_text()
    model = make_model(settings)
    plain = copy.deepcopy(model)
    params = sum(param.numel() for param in model.parameters())
    console.print(f"Text: {len(text):,} bytes of {files} source files. Model: {params:,} parameters.")

    if ranks > 1:
        limit_memory(model)
    optimizer = make_optimizer(model)
    parallel = pyrannc.RaNNCModule(model, optimizer)
    batches = [make_batch(text, ranks * settings.batch_per_rank, settings, step) for step in range(settings.steps)]
    own = [split(batch, rank, settings.batch_per_rank) for batch in batches]
    console.print(f"Training over {ranks} processes, {settings.batch_per_rank} rows each:")
    together = train(parallel, optimizer, own, parallel.device, console)

    agrees = True
    if rank == 0:
        console.print(f"The same steps in one process, {ranks * settings.batch_per_rank} rows:")
        initial = copy.deepcopy(plain.state_dict())
        alone = train(plain.to(parallel.device), make_optimizer(plain), batches, parallel.device, console)
        agrees = compare(together, alone, initial, console)
    # A process that left while rank 0 is still at work would look like one that died.
    pyrannc.barrier()
    return 0 if agrees else 1


def parse_arguments() -> Settings:
    parser = argparse.ArgumentParser(
        description="Pre-train a small BERT over all processes and compare with one process.",
        epilog="The memory limit leaves room for short sequences; set RANNC_MEM_LIMIT_GB for long ones.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=6, help="encoder layers")
    parser.add_argument("--hidden", type=int, default=384, help=f"width of the encoder, a multiple of {HEAD_WIDTH}")
    parser.add_argument("--batch-per-rank", type=int, default=8, help="rows of each process's own batch")
    parser.add_argument("--sequence-length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches")
    settings = Settings(**vars(parser.parse_args()))
    if min(settings.steps, settings.layers, settings.batch_per_rank) < 1:
        parser.error("--steps, --layers and --batch-per-rank must be at least 1")
    if settings.hidden < 1 or settings.hidden % HEAD_WIDTH:
        parser.error(f"--hidden must be a multiple of {HEAD_WIDTH}, not {settings.hidden}")
    if settings.sequence_length < 16:
        parser.error("--sequence-length must be at least 16")
    return settings


def read_text() -> tuple[Tensor, int]:
    """The standard library's sources as one tensor of bytes, and the number of files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), len(files)


def make_model(settings: Settings) -> nn.Module:
    """A model with random weights, the same in all processes. Without dropout, so that two runs can be compared."""
    torch.manual_seed(settings.seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // HEAD_WIDTH,
        intermediate_size=4 * settings.hidden,
        max_position_embeddings=settings.sequence_length,
        pad_token_id=PAD,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForPreTraining(config)


def limit_memory(model: nn.Module) -> None:
    """Makes the limit too low for all parameters with their gradients and AdamW's two moments on one device."""
    state_bytes = 4 * sum(param.nbytes for param in model.parameters())
    os.environ.setdefault("RANNC_MEM_LIMIT_GB", f"{0.9 * state_bytes / 2**30:.6f}")


def make_batch(text: Tensor, rows: int, settings: Settings, step: int) -> Batch:
    """A global batch, the same in all processes: rows of [CLS] first part [SEP] second part [SEP].

    In half of the rows the second part follows the first in the text. Every row has the same number of masked tokens,
    so that the mean over tokens is also the mean over rows.
    """
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    first = (settings.sequence_length - 3) // 2
    second = settings.sequence_length - 3 - first
    starts, elsewhere = torch.randint(len(text) - settings.sequence_length, (2, rows), generator=generator)
    unrelated = torch.rand(rows, generator=generator) < 0.5
    second_starts = torch.where(unrelated, elsewhere, starts + first)
    separator = torch.full((rows, 1), SEP)
    parts = [
        torch.full((rows, 1), CLS),
        text[starts[:, None] + torch.arange(first)],
        separator,
        text[second_starts[:, None] + torch.arange(second)],
        separator,
    ]
    segments = torch.tensor([0] * (first + 2) + [1] * (second + 1))
    tokens, labels = mask_tokens(torch.cat(parts, dim=1), generator)
    return {
        "input_ids": tokens,
        "token_type_ids": segments.expand(rows, -1).contiguous(),
        "labels": labels,
        "next_sentence_label": unrelated.long(),
    }


def mask_tokens(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hides the same number of bytes in every row, and gives them as labels.

    Of these, 80% become [MASK], 10% a random byte, 10% stay (Devlin et al., BERT, NAACL 2019, section 3.1).
    """
    rows, length = tokens.shape
    count = max(1, round(MASKED_SHARE * length))
    order = torch.rand(rows, length, generator=generator)
    chosen = order.masked_fill(tokens >= 256, 2.0).argsort(dim=1)[:, :count]
    originals = tokens.gather(1, chosen)
    draw = torch.rand(rows, count, generator=generator)
    random_bytes = torch.randint(256, (rows, count), generator=generator)
    hidden = torch.where(draw < 0.8, MASK, torch.where(draw < 0.9, random_bytes, originals))
    labels = torch.full_like(tokens, IGNORED).scatter(1, chosen, originals)
    return tokens.scatter(1, chosen, hidden), labels


def split(batch: Batch, rank: int, rows: int) -> Batch:
    """The rows of a global batch that are a rank's own."""
    return {name: tensor[rank * rows : (rank + 1) * rows] for name, tensor in batch.items()}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # BERT's own eps, which keeps AdamW from blowing up the rounding errors of gradients that are zero in exact numbers.
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6, weight_decay=0.01)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], device: torch.device, console: Console
) -> Run:
    """Trains one step on each batch."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    losses, ends = [], [time.perf_counter()]
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        task = progress.add_task("Training", total=len(batches), loss="")
        for batch in batches:
            optimizer.zero_grad()
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            ends.append(time.perf_counter())
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.4f}")
    # The first step captures the model and searches the plan.
    counted = min(1, len(batches) - 1)
    step_s = (ends[-1] - ends[counted]) / (len(batches) - counted)
    return Run(losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}, step_s)


def compare(together: Run, alone: Run, initial: dict[str, Tensor], console: Console) -> bool:
    """Prints both runs side by side; False when they differ by more than rounding explains."""
    table = Table("Step", "Loss, all processes", "Loss, 1 process", "Difference")
    pairs = list(zip(together.losses, alone.losses, strict=True))
    for step, (ours, theirs) in enumerate(pairs):
        if step % max(1, len(pairs) // 8) == 0 or step == len(pairs) - 1:
            table.add_row(str(step), f"{ours:.6f}", f"{theirs:.6f}", f"{abs(ours - theirs):.1e}")
    console.print(table)
    loss_difference = max(abs(ours - theirs) for ours, theirs in pairs)
    parameter_difference = largest_difference(together.state, alone.state)
    console.print(f"A step took {together.step_s:.2f} s over all processes, {alone.step_s:.2f} s in 1 process.")
    console.print(f"Largest difference of a loss: {loss_difference:.2e} (allowed: {LOSS_TOLERANCE:.0e})")
    console.print(f"Largest difference of a parameter: {parameter_difference:.2e} (allowed: {PARAMETER_TOLERANCE:.0e})")
    console.print(f"Largest change of a parameter by training: {largest_difference(alone.state, initial):.2e}")
    agrees = loss_difference <= LOSS_TOLERANCE and parameter_difference <= PARAMETER_TOLERANCE
    console.print("The runs agree." if agrees else "The runs differ.")
    return agrees


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    if one.keys() != other.keys():
        raise ValueError(f"one state lacks {sorted(one.keys() ^ other.keys())}")
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


if __name__ == "__main__":
    sys.exit(main())
