"""Trains a model with RaNNC and in one process on the same global batches, and prints the largest differences.

torchrun --nproc-per-node 4 benches/equality.py bert 4 --sizes 24 1024 128 --stages 2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import loss_of, make_batch, make_model
from torch import Tensor, nn

import pyrannc
from pyrannc.job import process


def main() -> int:
    options = parse()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_default_dtype(getattr(torch, options.dtype))
    if options.stages:
        os.environ["RANNC_PARTITION_NUM"] = str(options.stages)
    if options.microbatches:
        os.environ["RANNC_PIPELINE_NUM"] = str(options.microbatches)
    joined = process.ensure_process_group()

    def batches_of(rank: int) -> list[dict[str, Tensor]]:
        return [make_batch(options.model, options.rows, options.sizes, step, rank) for step in range(options.steps)]

    model = make_model(options.model, options.sizes, 0)
    losses, state, facts = train_with_rannc(model, batches_of(joined.rank), joined.device, options)
    if joined.rank == 0:
        every_rank = [batches_of(rank) for rank in range(joined.world_size)]
        whole = [
            {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            for parts in zip(*every_rank, strict=True)
        ]
        plain = make_model(options.model, options.sizes, 0)
        facts |= differences(*train_plain(plain, whole, joined.device, options), losses, state)
        print(json.dumps(facts), flush=True)
    pyrannc.barrier()
    pyrannc.clear()
    return 0 if joined.rank or max(facts["loss_diff"], facts["param_diff"]) <= options.tolerance else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["chain", "bert"])
    parser.add_argument("rows", type=int, help="rows of each rank's batch")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="HIDDEN LAYERS, or LAYERS HIDDEN SEQ")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stages", type=int, default=0, help="force this number of Stages")
    parser.add_argument("--microbatches", type=int, default=0, help="force this number of microbatches")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="adam")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference to accept")
    return parser.parse_args()


def optimizer_for(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=options.lr)
    # A large epsilon: gradients that are rounding noise around zero must not become steps of full length.
    return torch.optim.Adam(model.parameters(), lr=options.lr, eps=1e-4)


def train(
    model: Callable[..., object],
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, Tensor]],
    device: torch.device,
) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model(**{name: tensor.to(device) for name, tensor in batch.items()}))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def train_with_rannc(
    module: nn.Module, batches: list[dict[str, Tensor]], device: torch.device, options: argparse.Namespace
) -> tuple[list[float], dict[str, Tensor], dict[str, object]]:
    optimizer = optimizer_for(module, options)
    model = pyrannc.RaNNCModule(module, optimizer)
    losses = torch.tensor(train(model, optimizer, batches, device), device=device)
    peak = torch.tensor([torch.cuda.max_memory_allocated() if device.type == "cuda" else 0], device=device)
    peaks = torch.empty(process.get_world_size(), dtype=peak.dtype, device=device)
    pyrannc.all_gather(peak, peaks)
    if options.model == "chain":  # the criterion is outside: the global loss is the mean of the ranks' losses
        dist.all_reduce(losses, group=process.world())
        losses /= process.get_world_size()
    plan = model.plan
    facts = {
        "stages": [stage["ranks"] for stage in plan["stages"]],
        "microbatches": plan["microbatches"],
        "peak_gib": [round(value / 2**30, 2) for value in peaks.tolist()],
        "predicted_gib": [round(sum(s["predicted"]["memory"].values()) / 2**30, 2) for s in plan["stages"]],
    }
    return losses.tolist(), model.state_dict(), facts


def train_plain(
    module: nn.Module, batches: list[dict[str, Tensor]], device: torch.device, options: argparse.Namespace
) -> tuple[list[float], dict[str, Tensor]]:
    model = module.to(device)
    losses = train(model, optimizer_for(model, options), batches, device)
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def differences(
    plain_losses: list[float], plain_state: dict[str, Tensor], losses: list[float], state: dict[str, Tensor]
) -> dict[str, object]:
    if plain_state.keys() != state.keys():
        sys.exit("the state dicts have different keys")
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, plain_losses, strict=True))
    squares = [(float((state[k] - v).square().sum()), float(v.square().sum())) for k, v in plain_state.items()]
    param = (sum(diff for diff, _ in squares) / sum(whole for _, whole in squares)) ** 0.5
    return {"losses": losses, "loss_diff": loss, "param_diff": param}


if __name__ == "__main__":
    sys.exit(main())
