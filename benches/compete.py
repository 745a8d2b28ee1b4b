"""RaNNC beside what a user would take instead, on the same models, weights and batches; prints a table.

    python benches/compete.py --ranks 2 --results /tmp/compete.jsonl --minutes 9

Cells of one row run in turns on this machine, several rounds of them; rows come by priority. What has ended is kept in
the results file, and a later start goes on from there. Numbers of a system whose losses over ten steps are not those of
the row's first system are marked: they do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from competitors import SYSTEMS, Task
from jobs import Done, Job, run_jobs
from models import loss_of, make_batch, make_model
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

_PEAK_FLOPS = 989e12
"""Of an H100 or H200 in bfloat16, without sparsity."""

_TOLERANCES = {"float32": 1e-4, "autocast": 2e-2, "bfloat16": 4e-2}
"""By how much losses may differ, relative to their size, by precision."""


@dataclass(frozen=True)
class Row:
    """A line of the table: a task, and who takes part beside RaNNC.

    Attributes:
        ranks: for how many it is meant; 0 for any.
        environment: variables for all who take part.
    """

    name: str
    task: Task
    systems: tuple[str, ...]
    ranks: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)

    def task_for(self, ranks: int) -> Task:
        """The task on other ranks than it is meant for: each has as many rows."""
        rows = self.task.rows // self.ranks * ranks if self.ranks else self.task.rows
        return replace(self.task, rows=rows)


_EAGER = ("ddp", "fsdp2-kept", "fsdp2-freed", "torch-1f1b")
_COMPILED = ("ddp-compiled", "fsdp2-compiled", "torch-1f1b-compiled")
_ALL = (*_EAGER, *_COMPILED, "fsdp2-freed-compiled", "torch-interleaved", "torch-interleaved-compiled")
_WITHOUT_STAGES = ("ddp", "fsdp2-kept", "fsdp2-freed", "ddp-compiled", "fsdp2-compiled")
_BERT_48, _BERT_96 = (48, 1600, 512), (96, 2048, 512)
_GPT2_24, _T5_24, _T5_3B = (24, 1280, 512), (24, 1024, 4096, 16, 64, 512), (24, 2048, 8192, 32, 64, 512)
_UNET = (32, 6, 160, 288, 288)
_SLOW = {"NCCL_P2P_DISABLE": "1"}

ROWS = [
    Row("bert-48", Task("bert", _BERT_48, 32), (*_ALL, "bound")),
    Row("bert-48 bfloat16", Task("bert", _BERT_48, 32, "bfloat16"), (*_EAGER, "ddp-compiled", "bound")),
    Row("bert-96", Task("bert", _BERT_96, 32), _EAGER),
    Row("bert-96 64 GiB", Task("bert", _BERT_96, 32, limit_gib=64), _EAGER),
    Row("bert-96 48 GiB", Task("bert", _BERT_96, 32, limit_gib=48), _EAGER),
    Row("bert-96 32 GiB", Task("bert", _BERT_96, 32, limit_gib=32), _EAGER),
    Row("gpt2-24", Task("gpt2", _GPT2_24, 32), (*_EAGER, "ddp-compiled")),
    Row("t5-24", Task("t5", _T5_24, 32), _WITHOUT_STAGES),
    Row("gpt2-24 bfloat16", Task("gpt2", _GPT2_24, 32, "bfloat16"), ("ddp", "ddp-compiled", "bound")),
    Row("t5-24 bfloat16", Task("t5", _T5_24, 32, "bfloat16"), ("ddp", "ddp-compiled", "bound")),
    Row("resnet152x4", Task("resnet152", (4, 224), 64, "float32", "sgd"), ("ddp",)),
    Row("unet3d", Task("unet3d", _UNET, 2, "float32", "sgd"), ("ddp", "fsdp2-kept")),
    Row("bert-large short", Task("bert", (24, 1024, 128), 16), ("ddp", "ddp-compiled")),
    Row("tutorial", Task("chain", (512, 10), 128, "float32", "sgd"), ("ddp", "ddp-compiled")),
    Row("bert-48 dropout", Task("bert", _BERT_48, 32, dropout=0.1), ("ddp", "ddp-compiled")),
    Row("t5-24 dropout", Task("t5", _T5_24, 32, dropout=0.1), ("ddp", "ddp-compiled")),
    Row("bert-48 slow links", Task("bert", _BERT_48, 32), ("ddp", "fsdp2-kept", "torch-1f1b"), environment=_SLOW),
    Row("bert 5 B", Task("bert", _BERT_96, 128), _ALL, 8),
    Row("bert 5 B slow links", Task("bert", _BERT_96, 128), (*_EAGER, "torch-1f1b-compiled"), 8, _SLOW),
    Row("bert 13 B", Task("bert", (256, 2048, 512), 64), _EAGER, 8),
    Row("gpt2 7 B", Task("gpt2", (32, 4096, 1024), 64), _EAGER, 8),
    Row("bert 100 B", Task("bert", (80, 10240, 512), 8, "bfloat16", one_copy=True), (), 8),
    Row("resnet152x8", Task("resnet152", (8, 224), 256, "float32", "sgd"), ("ddp", "fsdp2-kept"), 8),
    Row("resnet152x8 slow links", Task("resnet152", (8, 224), 256, "float32", "sgd"), ("ddp", "fsdp2-kept"), 8, _SLOW),
    Row("t5 3 B", Task("t5", _T5_3B, 128), _WITHOUT_STAGES, 8),
    Row("unet3d of 8", Task("unet3d", _UNET, 8, "float32", "sgd"), ("ddp", "fsdp2-kept"), 8),
    Row("tutorial of 5000", Task("chain", (5000, 100), 512, "float32", "sgd", 40), ("ddp", "fsdp2-freed"), 8),
    Row("tiny-bert", Task("bert", (4, 64, 32), 8, "float32"), (*_EAGER, "torch-interleaved", "bound"), 0),
    Row("tiny-bert dropout", Task("bert", (4, 64, 32), 8, "float32", dropout=0.1), ("ddp",), 0),
    Row("tiny-bert of one copy", Task("bert", (4, 64, 32), 8, "bfloat16", one_copy=True), (), 0),
    Row("tiny-gpt2", Task("gpt2", (4, 64, 32), 8, "float32"), (*_EAGER, "torch-interleaved"), 0),
]
"""By priority; the tiny ones are for trying this script without a GPU."""


def main() -> int:
    options = parse()
    until = time.monotonic() + options.minutes * 60
    known = list(read(options.results))
    chosen = options.rows or [row.name for row in ROWS if row.ranks == options.ranks]
    for row in [row for row in ROWS if row.name in chosen]:
        for round_, system in [(r, s) for r in range(options.rounds) for s in systems_of(row, options)]:
            cell = {"row": row.name, "system": system, "round": round_, "ranks": options.ranks}
            if time.monotonic() < until and not any(cell.items() <= done.items() for done in known):
                known.append(cell | run(row, system, options, until - time.monotonic()))
                with options.results.open("a") as file:
                    file.write(json.dumps(known[-1]) + "\n")
    Console(width=200).print(table(known, options.ranks))
    return 0 if known else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines, which is added to")
    known = [row.name for row in ROWS]
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=known,
        help="by default those that are meant for so many ranks; on others each has as many rows",
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=2, help="how often each cell runs")
    parser.add_argument("--minutes", type=float, default=60, help="after so many no cell is started")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one cell")
    return parser.parse_args()


def systems_of(row: Row, options: argparse.Namespace) -> list[str]:
    # A split into one Stage on each rank stands beside torch's.
    own = ["rannc", *(["rannc-stages"] if "torch-1f1b" in row.systems else [])]
    return [system for system in (*row.systems[:1], *own, *row.systems[1:]) if system in options.systems]


def read(results: Path) -> Iterator[dict[str, Any]]:
    """What has ended before."""
    if results.exists():
        yield from map(json.loads, results.read_text().splitlines())


def run(row: Row, system: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """What a cell comes to: its figures, or why there are none."""
    alone = system == "bound"
    task = row.task_for(options.ranks)
    task = replace(task, rows=task.rows // options.ranks) if alone else task
    arguments = ("compete_cell.py", system, json.dumps(asdict(task)))
    job = Job(f"{row.name}: {system}", 1 if alone else options.ranks, arguments, row.environment)
    (done,) = run_jobs([job], options.ranks, options.timeout, left_s, lambda _: None)
    print(f"{row.name}: {system}: {told(done)} ({done.seconds:.0f} s)", file=sys.stderr)
    return done.results[-1] if done.results else {"failure": done.failure}


def told(done: Done) -> str:
    return f"{median(done.results[-1]['ms']):.1f} ms" if done.results else done.failure


_COLUMNS = (
    *("row", "system", "ms a step", "(best)", "samples/s", "MFU", "of best peer", "predicted", "memory predicted"),
    *("idle", "first step", "reserved GiB", "losses", "plan"),
)


def table(cells: Sequence[dict[str, Any]], ranks: int) -> Table:
    """All cells that have figures, with the best peer of each row."""
    found = Table(*_COLUMNS, title=f"{ranks} ranks; medians of all rounds")
    for row in ROWS:
        own = [cell for cell in cells if cell["row"] == row.name and cell["ranks"] == ranks]
        task = row.task_for(ranks)
        flops = flops_of(task) if any("ms" in cell for cell in own) else 0.0
        times = {system: _times(own, system) for system in dict.fromkeys(cell["system"] for cell in own)}
        best = min((median(ms) for system, ms in times.items() if ms and _is_peer(system)), default=None)
        for system, milliseconds in times.items():
            mine = [cell for cell in own if cell["system"] == system]
            if milliseconds:
                found.add_row(row.name, system, *_figures(task, system, own, mine, milliseconds, best, flops / ranks))
            else:
                found.add_row(row.name, system, "-", *[""] * (len(_COLUMNS) - 4), mine[-1]["failure"][:60])
    return found


def _is_peer(system: str) -> bool:
    return "rannc" not in system and system != "bound"


def _figures(
    task: Task,
    system: str,
    cells: Sequence[dict[str, Any]],
    mine: Sequence[dict[str, Any]],
    milliseconds: Sequence[float],
    best: float | None,
    flops: float,
) -> list[str]:
    """The columns behind the name of a system, whose cells are ``mine``; ``flops`` are a rank's."""
    ms, last = median(milliseconds), mine[-1]
    return [
        f"{ms:.1f}",
        f"{min(milliseconds):.1f}",
        f"{task.rows / ms * 1e3:.1f}",
        f"{flops / (ms / 1e3) / _PEAK_FLOPS:.1%}",
        f"{ms / best:.3f}" if best else "",
        f"{last['predicted_ms'] / ms - 1:+.1%}" if last.get("predicted_ms") else "",
        f"{last['memory_error']:+.1%}" if last.get("memory_error") is not None else "",
        f"{last['idle']:.1%}" if last.get("idle") is not None else "",
        f"{last['first_s']:.0f} s" if "first_s" in last else "",
        f"{max(cell.get('reserved_gib', 0.0) for cell in mine):.1f}",
        "" if system == "bound" else _agreement(cells, mine, task.precision),
        last.get("plan", ""),
    ]


def _times(cells: Sequence[dict[str, Any]], system: str) -> list[float]:
    return [ms for cell in cells if cell["system"] == system for ms in cell.get("ms", [])]


def _agreement(row: Sequence[dict[str, Any]], mine: Sequence[dict[str, Any]], precision: str) -> str:
    """Whether losses are those of the row's first system that has some."""
    right = next(cell["losses"] for cell in row if "losses" in cell and cell["system"] != "bound")
    pairs = [pair for cell in mine if "losses" in cell for pair in zip(cell["losses"], right, strict=True)]
    apart = max(abs(loss - other) / max(abs(other), 1e-9) for loss, other in pairs)
    return "equal" if apart <= _TOLERANCES[precision] else f"DIFFER by {apart:.1%}"


def flops_of(task: Task) -> float:
    """Floating-point operations of a step, those of one row times the rows; 0 if they cannot be told.

    What a model asks its data is answered with yes: nothing is masked, and no rows are packed.
    """
    with torch.device("meta"):
        module = make_model(task.model, list(task.sizes), 0)
    batch = {name: tensor.to("meta") for name, tensor in make_batch(task.model, 1, list(task.sizes), 0, 0).items()}
    with FlopCounterMode(display=False) as counter, patch.object(torch.Tensor, "__bool__", lambda _: True):
        try:
            loss_of(module(**batch)).backward()
        except RuntimeError as error:
            # A model that looks at its data cannot without a device.
            print(f"no MFU for {task.model}: {error}", file=sys.stderr)
            return 0.0
    return float(counter.get_total_flops()) * task.rows


if __name__ == "__main__":
    sys.exit(main())
