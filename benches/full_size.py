"""Ten steps of the models of examples/ at sizes that fill a GPU, by RaNNC under its own plan and in one process.

    python benches/full_size.py --output /tmp/full_size.jsonl --models t5-3b llama-1b --ranks 1 2

Both train the same weights on the same global batch. A table says whether the losses fall and how far apart they are,
and holds the predicted step time and memory against the measured. Where one device does not hold the model, the row
says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jobs import Done, Job, run_jobs
from prediction import empty_cache, facts, scaled, synchronize

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from families import FULL, TINY, Family, Row  # lies beside the examples
from families.causal import Llama, Mixtral
from families.images import ResNet
from torch import Generator, Tensor, nn

import pyrannc
from pyrannc.core.plan import PlanFacts
from pyrannc.job import process

_STEPS = 10
_WARMUP, _TIMED = 2, 10
_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A model, the rows of its global batch on each rank, and the type that is computed in."""

    family: Family
    rows: int
    autocast: torch.dtype | None = torch.bfloat16


CASES = {
    "t5-3b": Case(FULL["t5-3b"], 4),
    "resnet-152x4": Case(ResNet(layers=152, width=4, pixels=224, classes=1000), 32, None),
    "unet3d-mlperf": Case(FULL["unet3d-mlperf"], 1),
    "llama-1b": Case(
        Llama(layers=16, hidden=2048, heads=32, key_heads=8, feed_forward=8192, sequence=2048, vocabulary=128256), 4
    ),
    "mixtral-8x0.1b": Case(
        Mixtral(
            layers=8, hidden=1024, heads=16, key_heads=4, feed_forward=2560, experts=8, sequence=1024, vocabulary=32000
        ),
        8,
    ),
    "tiny-llama": Case(TINY["llama"], 4),
    "tiny-mixtral": Case(TINY["mixtral"], 4),
}
"""The tiny ones are for trying this script without a GPU."""


def main() -> int:
    options = parse()
    if options.cell:
        return run(options.cell)
    jobs = [Job(f"{name} on {ranks}", ranks, ("full_size.py", "--cell", name))
            for name, ranks in product(options.models, options.ranks)]  # fmt: skip
    ended = run_jobs(jobs, options.devices, options.timeout, options.deadline, lambda done: note(done, options.output))
    print(markdown(sorted(ended, key=lambda done: jobs.index(done.job))))
    return 0 if any(done.results for done in ended) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=[n for n in CASES if "tiny" not in n])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--devices", type=int, default=max(1, torch.cuda.device_count()), help="of this machine")
    parser.add_argument("--timeout", type=float, default=280, help="seconds for a model on a number of ranks")
    parser.add_argument("--deadline", type=float, default=560, help="seconds for all")
    parser.add_argument("--output", type=Path, default=Path("/dev/null"), help="JSON lines are added to this file")
    parser.add_argument("--cell", choices=CASES, help="train this model on the ranks of this start, and print JSON")
    return parser.parse_args()


def note(done: Done, output: Path) -> None:
    with output.open("a") as file:
        file.write(json.dumps(asdict(done)) + "\n")
    print(f"{done.job.name} took {done.seconds:.0f} s {done.failure} {done.told[-800:]}", file=sys.stderr, flush=True)


def run(name: str) -> int:
    """Trains a model with RaNNC, then the plain one on rank 0, and prints what came of both."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    joined = process.ensure_process_group()
    case = CASES[name]
    model = built(case, joined.device)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()} if joined.rank == 0 else {}
    rows = case.rows * joined.world_size
    whole = batch(case, range(rows))
    found = by_rannc(case, model, rows, joined)
    gc.collect()
    empty_cache(joined.device)
    if joined.rank == 0:
        found |= {"model": name, "ranks": joined.world_size, "rows": rows}
        found |= by_one_process(case, model, weights, whole, joined.device)
        print(json.dumps(found), flush=True)
    pyrannc.barrier()
    pyrannc.clear()
    return 0


def built(case: Case, device: torch.device) -> nn.Module:
    """The model on the host; its weights are drawn on the device, which is much quicker."""
    torch.manual_seed(0)
    with device:
        model = case.family.model()
    model = model.cpu()
    empty_cache(device)
    return model


def batch(case: Case, numbers: range) -> Row:
    rows = [case.family.row(Generator().manual_seed(number)) for number in numbers]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def trained(
    case: Case, model: Callable[..., Any], optimizer: torch.optim.Optimizer, own: Row, device: torch.device
) -> tuple[list[float], float, float]:
    """The losses of the first steps, milliseconds of later ones, and seconds until the first was over."""
    own = {name: tensor.to(device) for name, tensor in own.items()}

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, case.autocast, enabled=case.autocast is not None):
            loss: Tensor = model(**own)["loss"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    start = time.perf_counter()
    losses = [step().item()]
    first_s = time.perf_counter() - start
    losses += [step().item() for _ in range(_STEPS - 1)]
    for _ in range(_WARMUP):
        step()
    synchronize(device)
    start = time.perf_counter()
    # One more: RaNNC measures a step until the next one starts.
    for _ in range(_TIMED + 1):
        step()
    synchronize(device)
    return losses, (time.perf_counter() - start) * 1e3 / (_TIMED + 1), first_s


def optimizer_of(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=_RATE, fused=device.type == "cuda")


def by_rannc(case: Case, plain: nn.Module, rows: int, joined: process.Process) -> dict[str, Any]:
    model = pyrannc.RaNNCModule(plain, optimizer := optimizer_of(plain, joined.device))
    own = batch(case, range(joined.rank * rows // joined.world_size, (joined.rank + 1) * rows // joined.world_size))
    losses, ms, first_s = trained(case, model, optimizer, own, joined.device)
    told = facts(PlanFacts.from_content(model.plan), model.report())
    told.pop("report")
    model.undeploy()
    return {"losses": losses, "ms": ms, "first_step_s": round(first_s, 1), **told}


def by_one_process(case: Case, model: nn.Module, weights: Row, whole: Row, device: torch.device) -> dict[str, Any]:
    """The plain model on the whole batch, if the device holds that."""
    try:
        model.load_state_dict(weights)
        model.to(device)
        losses, ms, _ = trained(case, model, optimizer_of(model, device), whole, device)
    except torch.OutOfMemoryError:
        return {"plain": "does not fit"}
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return {"plain_losses": losses, "plain_ms": ms, "plain_gib": scaled(peak, 2**30)}


def markdown(ended: list[Done]) -> str:
    """What ran as a table, and why the rest did not."""
    lines = [
        "| model | ranks | plan | loss, first and last | to one process | predicted ms | measured ms | error "
        "| predicted GiB | measured GiB | error | one process eager, ms | first step |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [f"| {' | '.join(cells(result))} |" for done in ended for result in done.results]
    lines += [f"- {done.job.name}: {done.failure[:300]}" for done in ended if done.failure]
    return "\n".join(lines)


def cells(result: dict[str, Any]) -> list[str]:
    losses, plain = result["losses"], result.get("plain_losses")
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)) if plain else None
    return [
        result["model"],
        str(result["ranks"]),
        result["plan"],
        f"{losses[0]:.4f}, {losses[-1]:.4f}",
        result.get("plain", "") if apart is None else f"{apart:.1e}",
        *(shown(result[key], ".1f") for key in ("predicted_ms", "measured_ms")),
        shown(result["time_error"], "+.1%"),
        *(shown(result[key], ".2f") for key in ("predicted_gib", "measured_gib")),
        shown(result["memory_error"], "+.1%"),
        shown(result.get("plain_ms"), ".1f"),
        f"{result['first_step_s']:.0f} s",
    ]


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
