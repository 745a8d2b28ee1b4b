"""Predicted against measured step time and peak memory, for many models, numbers of GPUs and memory limits.

    python benches/prediction_table.py --output /tmp/prediction.jsonl --models bert-24 gpt2-36 --ranks 1 2 4 --limits 16

Runs ``prediction.py`` for every model and number of ranks, side by side where GPUs are free, and prints a Markdown
table. Results are added to the output file as they come, so what has ended is kept whatever happens to the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jobs import Done, Job, run_jobs

_TOLD = 250
"""Characters of a failure that are shown."""


@dataclass(frozen=True)
class Case:
    """A model of :mod:`models`.

    Attributes:
        rows: what each rank brings.
        arguments: more of ``prediction.py``.
        environment: variables that all ranks have.
    """

    model: str
    sizes: tuple[int, ...]
    rows: int
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


_SLOW_LINKS = {"NCCL_P2P_DISABLE": "1"}
_TWO_STAGES = ("--stages", "2", "--microbatches", "8")

CASES = {
    "bert-24": Case("bert", (24, 1024, 512), 16),
    "bert-24, small steps": Case("bert", (24, 1024, 128), 4),
    "bert-24, 2 Stages": Case("bert", (24, 1024, 512), 16, _TWO_STAGES),
    "bert-24, 2 Stages, uneven rows": Case("bert", (24, 1024, 512), 17, _TWO_STAGES),
    "bert-24, slow links": Case("bert", (24, 1024, 512), 16, environment=_SLOW_LINKS),
    "bert-24, 2 Stages, slow links": Case("bert", (24, 1024, 512), 16, _TWO_STAGES, _SLOW_LINKS),
    "bert-48": Case("bert", (48, 1600, 512), 8),
    "bert-96": Case("bert", (96, 2048, 512), 8),
    "gpt2-36": Case("gpt2", (36, 1280, 1024), 8),
    "gpt2-36, tied over 2 Stages": Case("gpt2", (36, 1280, 1024), 8, _TWO_STAGES),
    "resnet152x2": Case("resnet152", (2, 224), 32),
    "t5-large": Case("t5", (24, 1024, 4096, 16, 64, 512), 16),
    "unet3d": Case("unet3d", (32, 6, 128, 192, 192), 1),
    "tiny-bert": Case("bert", (2, 64, 32), 4),
    "tiny-bert, uneven rows": Case("bert", (2, 64, 32), 3, ("--stages", "2", "--microbatches", "4")),
    "tiny-gpt2": Case("gpt2", (2, 64, 32), 4),
}
"""The tiny ones are for trying this script without a GPU."""


def main() -> int:
    options = parse()
    asked = product(options.models, options.ranks)
    jobs = [job_of(name, ranks, options) for name, ranks in asked if ranks > 1 or not needs_others(CASES[name])]
    ended = run_jobs(jobs, options.devices, options.timeout, options.deadline, lambda done: note(done, options.output))
    print(markdown(sorted(ended, key=lambda done: jobs.index(done.job))))
    return 0 if any(done.results for done in ended) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=[n for n in CASES if "tiny" not in n])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--limits", type=float, nargs="+", default=[16, 32, 80], help="GiB of a device; 0 is no limit")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count(), help="of this machine")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a model on a number of ranks")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for all cases")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added to this file")
    parser.add_argument("arguments", nargs="*", default=["--tf32"], help="for prediction.py, after --")
    return parser.parse_args()


def needs_others(case: Case) -> bool:
    """Whether the case says nothing on one rank."""
    return bool(case.environment) or "--stages" in case.arguments


def job_of(name: str, ranks: int, options: argparse.Namespace) -> Job:
    case = CASES[name]
    limits = [f"{limit_gb:g}" for limit_gb in options.limits]
    script = ("prediction.py", case.model, str(case.rows), "--sizes", *map(str, case.sizes))
    arguments = (*case.arguments, "--memory-limits-gb", *limits, *options.arguments)
    return Job(f"{name} on {ranks}", ranks, (*script, *arguments), case.environment)


def note(done: Done, output: Path) -> None:
    with output.open("a") as file:
        file.write(json.dumps(asdict(done)) + "\n")
    for result in done.results:
        print(f"{title(done, result)}: {result.get('failure') or ', '.join(cells(result))}", file=sys.stderr)
    print(f"{done.job.name} took {done.seconds:.0f} s {done.failure}", file=sys.stderr, flush=True)


def title(done: Done, result: dict[str, Any]) -> str:
    return f"{done.job.name}, {result['memory_limit_gb']:g} GiB"


def markdown(ended: list[Done]) -> str:
    """The cases that ran as a table, mean and worst errors, and why the others did not run."""
    lines = [
        "| case | plan | predicted ms | measured ms | error | predicted GiB | measured GiB | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    found = [(title(done, result), result) for done in ended for result in done.results]
    ran = [(case, result) for case, result in found if "failure" not in result]
    lines += [f"| {case} | {' | '.join(cells(result))} |" for case, result in ran]
    lines += ["", *(errors(what, [result for _, result in ran]) for what in ("time", "memory"))]
    lines += [f"- {case}: {result['failure'][:_TOLD]}" for case, result in found if "failure" in result]
    lines += [f"- {done.job.name}: {done.failure[:_TOLD]}" for done in ended if done.failure]
    return "\n".join(lines)


def cells(result: dict[str, Any]) -> list[str]:
    return [
        result["plan"],
        number(result["predicted_ms"], ".1f"),
        number(result["measured_ms"], ".1f"),
        number(result["time_error"], "+.1%"),
        number(result["predicted_gib"], ".2f"),
        number(result["measured_gib"], ".2f"),
        number(result["memory_error"], "+.1%"),
    ]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def errors(what: str, results: list[dict[str, Any]]) -> str:
    found = [abs(result[f"{what}_error"]) for result in results if result[f"{what}_error"] is not None]
    if not found:
        return f"- error of {what}: nothing was measured"
    return f"- error of {what}: mean {fmean(found):.1%}, worst {max(found):.1%}, over {len(found)} cases"


if __name__ == "__main__":
    sys.exit(main())
