"""One of thirteen families of models, trained by all processes on made-up data.

torchrun --nproc-per-node 2 examples/pretrain.py --model llama --layers 4 --hidden 128
mpirun -np 2 python examples/pretrain.py --model unet3d
python examples/pretrain.py --model resnet --layers 50

The models stand in examples/families. Full sizes are captured without memory, and planned without a device:

python -m pyrannc capture --autocast float16 examples/pretrain.py:example -o bert.json -- --model bert-4.9b
rannc plan bert.json --cluster V100x8x4 --cluster H200x8 --batch 256
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields, replace

import torch
from families import FULL, TINY, Family, Row
from torch import Generator, nn

import pyrannc

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
EXAMPLE_ROWS = 4
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    family: Family
    batch: int
    steps: int
    dtype: torch.dtype
    autocast: torch.dtype | None


def main() -> None:
    train(parse_arguments(sys.argv[1:]))


def train(settings: Settings) -> list[float]:
    """Trains the model and returns the loss of each step."""
    net = make_model(settings)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    model = pyrannc.RaNNCModule(net, optimizer)
    scaler = torch.GradScaler(model.device.type, enabled=settings.autocast is torch.float16)

    losses = []
    for step in range(settings.steps):
        batch = make_batch(settings, own_rows(settings, step))
        optimizer.zero_grad()
        with torch.autocast(model.device.type, settings.autocast, enabled=settings.autocast is not None):
            loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()})["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if pyrannc.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    return losses


def example() -> tuple[nn.Module, tuple[()], Row]:
    """What ``python -m pyrannc capture`` asks for: the model, and the arguments of one call."""
    settings = parse_arguments(sys.argv[1:])
    with torch.device("cpu"):
        batch = make_batch(settings, list(range(EXAMPLE_ROWS)))
    return make_model(settings), (), batch


def make_model(settings: Settings) -> nn.Module:
    """The model with random weights, the same in all processes."""
    torch.set_default_dtype(settings.dtype)
    torch.manual_seed(0)
    return settings.family.model()


def own_rows(settings: Settings, step: int) -> list[int]:
    """The numbers of this process's own rows; those of all processes together, in their order, are the global batch."""
    rank, ranks = pyrannc.get_rank(), pyrannc.get_world_size()
    batch = range(step * settings.batch, (step + 1) * settings.batch)
    return list(batch[rank * len(batch) // ranks : (rank + 1) * len(batch) // ranks])


def make_batch(settings: Settings, numbers: list[int]) -> Row:
    """Rows by their numbers: each is the same, whichever process draws it."""
    torch.set_default_dtype(settings.dtype)
    rows = [settings.family.row(Generator().manual_seed(number)) for number in numbers]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def parse_arguments(argv: list[str]) -> Settings:
    models = TINY | FULL
    parser = argparse.ArgumentParser(
        description="Pre-train a model on made-up data.",
        epilog="Sizes: " + "; ".join(f"{name}: {described(model)}" for name, model in models.items()),
    )
    parser.add_argument("--model", choices=models, required=True, metavar="NAME", help=", ".join(models))
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch [default: %(default)s]")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps [default: %(default)s]")
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="of parameters [default: %(default)s]")
    parser.add_argument("--autocast", choices=("float16", "bfloat16"), help="what is computed in less precision")
    sizes = dict.fromkeys(field.name for model in TINY.values() for field in fields(model))
    group = parser.add_argument_group("sizes", "instead of those of the model")
    for size in sizes:
        group.add_argument(f"--{size.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    arguments = vars(parser.parse_args(argv))
    model = models[arguments["model"]]
    given = {size: arguments[size] for size in sizes if size in arguments}
    for size in given:
        if not hasattr(model, size):
            parser.error(f"{arguments['model']} has no {size}; it has {described(model)}")
    if arguments["batch"] < pyrannc.get_world_size():
        parser.error(f"--batch must be at least {pyrannc.get_world_size()}, the number of processes")
    try:
        model = replace(model, **given)
    except ValueError as error:
        parser.error(str(error))
    return Settings(
        model,
        arguments["batch"],
        arguments["steps"],
        TYPES[arguments["dtype"]],
        TYPES.get(arguments["autocast"]),
    )


def described(model: Family) -> str:
    return " ".join(f"{field.name}={getattr(model, field.name)}" for field in fields(model))


if __name__ == "__main__":
    main()
