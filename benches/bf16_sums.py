"""Losses of trainings whose gradients are summed in bfloat16, beside the spread of seeds in float32.

torchrun --nproc-per-node 2 benches/bf16_sums.py --steps 500 --seeds 5
"""

from __future__ import annotations

import argparse
import os
from statistics import mean, stdev

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import pyrannc
from pyrannc.job import process

WORDS, TOKENS, ROWS, LAST = 64, 32, 16, 50
_TYPES = ("float32", "bfloat16")


def main() -> int:
    options = parse()
    joined = process.ensure_process_group()
    seeds = range(options.seeds)
    losses = {(kind, seed): trained(seed, kind, options.steps, joined.device) for kind in _TYPES for seed in seeds}
    exact = [losses["float32", seed] for seed in seeds]
    differences = [losses["bfloat16", seed] - losses["float32", seed] for seed in seeds]
    if joined.rank == 0:
        show(losses, options)
        most = max(map(abs, differences))
        print(f"spread of seeds in float32: {stdev(exact):.4f}")
        print(f"bfloat16 is off by {mean(differences):+.1e} on average, {most:.1e} at most")
    pyrannc.barrier()
    return 0 if max(map(abs, differences)) <= stdev(exact) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    return parser.parse_args()


def trained(seed: int, reduce_dtype: str, steps: int, device: torch.device) -> float:
    """The mean loss of the last steps of a small GPT-2 in bfloat16 autocast, by its own stream of words."""
    os.environ["RANNC_REDUCE_DTYPE"] = reduce_dtype
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=WORDS, n_layer=2, n_embd=64, n_head=2, n_positions=TOKENS, use_cache=False)
    module = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    model = pyrannc.RaNNCModule(module, optimizer)
    words = Generator().manual_seed(1000 * seed + process.get_rank())
    found = []
    for _ in range(steps):
        ids = sentences(words).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    model.undeploy()
    total = torch.stack(found[-LAST:]).mean().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def sentences(generator: Generator) -> Tensor:
    """Words that follow from the one before, but for one in four, which is any."""
    words = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    follows = torch.rand(ROWS, TOKENS, generator=generator) < 0.75
    for place in range(1, TOKENS):
        next_word = (3 * words[:, place - 1] + 1) % WORDS
        words[:, place] = torch.where(follows[:, place], next_word, words[:, place])
    return words


def show(losses: dict[tuple[str, int], float], options: argparse.Namespace) -> None:
    table = Table(title=f"mean loss of the last {LAST} of {options.steps} steps")
    table.add_column("seed")
    for kind in _TYPES:
        table.add_column(kind, justify="right")
    for seed in range(options.seeds):
        table.add_row(str(seed), *(f"{losses[kind, seed]:.4f}" for kind in _TYPES))
    Console(width=100).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
