"""``python -m pyrannc zoo``: trains models of public libraries on several ranks and holds them against one process."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .case import ROWS, Case
from .trial import BY_ROUNDING, LIBRARIES, Outcome, cases
from .workers import Workers

_COLUMNS = ("cut", "in leaves", "in tail", "uncut", "chance", "refused", "failed", "hung", "wrong", "no case")


def main(argv: Sequence[str]) -> int:
    """Runs the command; the status is 1 if a model came out wrong, or ended or hung its ranks."""
    options = _parser().parse_args(argv)
    # All models are made from configurations; what asks the hub for one would wait for it where there is no network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    chosen = choose(cases(options.library or LIBRARIES), options)
    results = Results(options.results)
    todo = [case for case in chosen if str(case) not in results.found]
    print(f"{len(chosen)} models, {len(chosen) - len(todo)} of them known from {options.results}", flush=True)
    left = iter(todo)
    lock = threading.Lock()

    def work() -> None:
        with pair(options.stages, as_they_are=options.as_they_are, gpus=options.gpus) as (cut, uncut):
            while True:
                with lock:
                    case = next(left, None)
                if case is None:
                    return
                start_s = time.monotonic()
                outcome = hold(case, cut, uncut, options.timeout)
                with lock:
                    results.add(case, outcome, time.monotonic() - start_s)
                    print(f"{outcome.column:10} {case}  {outcome.why}", flush=True)

    with ThreadPoolExecutor(options.jobs) as jobs:
        for job in [jobs.submit(work) for _ in range(options.jobs)]:
            job.result()
    print(table([results.found[str(case)] for case in chosen if str(case) in results.found]))
    return int(any(results.found[str(case)]["column"] in ("wrong", "failed", "hung") for case in chosen))


@contextmanager
def pair(stages: int, *, as_they_are: bool, gpus: bool = False) -> Iterator[tuple[Workers, Workers]]:
    """The ranks that hold a model in Stages, and those that hold one uncut."""
    rows = tuple(ROWS // stages + (rank < ROWS % stages) for rank in range(stages))
    cut = Workers(rows, stages, as_they_are=as_they_are, gpus=gpus)
    uncut = Workers((ROWS // 2, ROWS - ROWS // 2), 1, as_they_are=as_they_are, gpus=gpus)
    try:
        yield cut, uncut
    finally:
        cut.close()
        uncut.close()


def hold(case: Case, cut: Workers, uncut: Workers, timeout_s: float) -> Outcome:
    """A model in Stages, or, where there are none, uncut; where a rounding decides, with its parameters moved."""
    outcome = cut.hold(case.library, case.name, timeout_s)
    if outcome.column == "chance" and outcome.why.startswith(BY_ROUNDING):
        outcome = cut.hold(case.library, case.name, timeout_s, is_moved=True)
        outcome = replace(outcome, why=f"with its parameters moved. {outcome.why}".strip())
    if outcome.column != "refused":
        return outcome
    whole = uncut.hold(case.library, case.name, timeout_s)
    if whole.column in ("uncut", "chance"):
        return Outcome("uncut", outcome.why, whole.stages, whole.in_leaves, whole.in_tail)
    return whole if whole.column in ("wrong", "failed", "hung") else outcome


def choose(found: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """The models that the options name."""
    wanted = [
        case
        for case in found
        if (not options.family or case.family in options.family)
        and (not options.only or re.search(options.only, str(case)))
    ]
    index, count = options.shard
    # One after another goes to another shard, for models of one kind stand together.
    return [case for place, case in enumerate(wanted) if place % count == index]


class Results:
    """What came of models, one line of JSON for each; without a file, for this run alone."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.found: dict[str, Mapping[str, Any]] = {}
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                item = json.loads(line)
                self.found[f"{item['library']}/{item['name']}"] = item

    def add(self, case: Case, outcome: Outcome, seconds: float) -> None:
        """Keeps one."""
        item = {"library": case.library, "family": case.family, "name": case.name, **asdict(outcome),
                "seconds": round(seconds, 1)}  # fmt: skip
        self.found[str(case)] = item
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(item) + "\n")


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """How many models of each library came out how, and every failure with its cause."""
    lines = ["", f"{'library':14}" + "".join(f"{column:>11}" for column in _COLUMNS) + f"{'of':>7}"]
    for library in dict.fromkeys(item["library"] for item in found):
        counts = Counter(item["column"] for item in found if item["library"] == library)
        total = sum(counts.values()) - counts["no case"]
        lines.append(f"{library:14}" + "".join(f"{counts[column]:11}" for column in _COLUMNS) + f"{total:7}")
    for column in _COLUMNS[2:]:
        named = [f"  {item['library']}/{item['name']}: {item['why']}" for item in found if item["column"] == column]
        lines += ["", f"{column}:", *named] if named else []
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyrannc zoo",
        description="Trains models of transformers, timm, torchvision, torchaudio and diffusers, as far as they are "
        "installed, on several processes, and holds outputs, gradients, buffers and parameters of two steps against "
        "one process.",
        epilog="Columns: cut: in Stages, with less than 10% of the parameters in sub-modules that stay whole; in "
        "leaves: with more; in tail: half of them or more run on all rows on every process; uncut: one Stage; chance: "
        "it draws random numbers, or a rounding decides, with its parameters moved too; no case: it does not run in "
        "one process as the rules make it. Example: python -m pyrannc zoo --library timm --shard 0/8 --results "
        "timm.jsonl",
    )
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="this one alone; may be repeated")
    parser.add_argument("--family", action="append", help="models of this design alone; may be repeated")
    parser.add_argument("--only", metavar="REGEX", help="models whose name, with the library's, matches")
    parser.add_argument("--shard", type=_shard, default=(0, 1), metavar="I/N", help="part I of N, counted from 0")
    parser.add_argument(
        "--jobs", type=_count, default=1, metavar="N", help="models side by side, each on its processes"
    )
    parser.add_argument("--stages", type=int, default=2, choices=(2, 3), help="Stages, each on one process")
    parser.add_argument(
        "--as-they-are",
        action="store_true",
        help="with the dropout and batch statistics that they train with by default, in one microbatch; of one that "
        "draws random numbers, the captured graph is held against the model with the same numbers",
    )
    parser.add_argument(
        "--gpus", action="store_true", help="each process computes on a GPU of its own, where Spans are compiled, too"
    )
    parser.add_argument("--results", type=Path, help="file of results; models in it are not run again")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="for one model")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I below N")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
