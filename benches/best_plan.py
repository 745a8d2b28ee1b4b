"""Is the chosen plan the fastest? Times it beside the next best and random plans that fit, on the same GPUs.

    python benches/best_plan.py bert 8 --sizes 48 1600 512 --ranks 4 --memory-limit-gb 16 --tf32 --output best.jsonl

A first run profiles the model and chooses a plan. A search with the same profile gives the next best ones, and more
searches are held to random replicas and microbatches; half of what they find is then cut elsewhere. ``prediction.py``
runs all of them. Results are added to the output file as they come.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jobs import Done, Job, run_jobs
from models import add_model_arguments, loss_is_inside, make_batch, make_model
from prediction import set_precision

from pyrannc._native import Cluster, Graph, Plan, Profile
from pyrannc.capture import capture
from pyrannc.core.plan import PlanFacts, content
from pyrannc.core.settings import SearchSettings
from pyrannc.errors import PlanError, PlanFileError
from pyrannc.planning.machine import own_device

_DRAWS = 300
"""Random demands that are tried at most: many fit no plan."""
_MOVES = 20
"""Ways to move the cuts of a plan that are tried at most: many are no cuts, or the plan does not fit."""
_REACH = 0.25
"""How far a cut is moved at most, by the average length of a Stage."""
_MARGIN = 0.1
"""The search's own: share of the memory that no plan uses."""

_MICROBATCHES = (1, 2, 4, 8, 16, 32)
_CHOSEN = "chosen.json"
_PROFILE = "profile.json"


def main() -> int:
    options = parse()
    set_precision(options)
    ends = time.monotonic() + options.deadline
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as beside:
        folder = Path(name)
        capturing = beside.submit(captured_graph, options)
        choose(options, folder, ends)
        drawing = Drawing(capturing.result(), options, folder)
        others = {"next": drawing.next_best(), "random": drawing.random_plans()}
        results = time_plans(options, write(others, folder), ends)
    print(markdown(results))
    return 0 if _CHOSEN in results and "failure" not in results[_CHOSEN] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("rows", type=int, help="rows of each rank's batch")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--memory-limit-gb", type=float, required=True, help="of each device")
    parser.add_argument("--next-best", type=int, default=4, help="how many of the next best plans to run")
    parser.add_argument("--random", type=int, default=10, help="how many random plans to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help="of the parameters")
    parser.add_argument("--tf32", action="store_true", help="TF32 in matrix products and convolutions")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for all")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added to this file")
    return parser.parse_args()


def captured_graph(options: argparse.Namespace) -> Graph:
    """The graph of the model, captured without memory for its parameters."""
    with torch.device("meta"):
        model = make_model(options.model, options.sizes, 0)
    batch = make_batch(options.model, options.rows, options.sizes, 0, 0)
    captured = capture(model, (), batch, device=_device(), rows=options.rows)
    return Graph.from_json(captured.graph_json)


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def job(options: argparse.Namespace, name: str, more: list[str], environment: dict[str, str]) -> Job:
    """A run of ``prediction.py``."""
    script = ["prediction.py", options.model, str(options.rows), "--sizes", *map(str, options.sizes)]
    script += ["--memory-limits-gb", f"{options.memory_limit_gb:g}", "--dtype", options.dtype]
    script += ["--tf32"] if options.tf32 else []
    return Job(name, options.ranks, (*script, *more), environment)


def run(options: argparse.Namespace, item: Job, ends: float) -> Done:
    """Runs one job on all devices until it or the time ends."""
    left_s = max(1.0, ends - time.monotonic())
    (done,) = run_jobs([item], options.ranks, left_s, left_s, lambda done: note(done, options.output))
    return done


def note(done: Done, output: Path) -> None:
    with output.open("a") as file:
        file.write(json.dumps(asdict(done)) + "\n")
    print(f"{done.job.name} took {done.seconds:.0f} s {done.failure}", file=sys.stderr, flush=True)


def choose(options: argparse.Namespace, folder: Path, ends: float) -> None:
    """Lets RaNNC profile and choose, and leaves its plan and the Profile in the folder."""
    environment = {
        "RANNC_SAVE_DEPLOYMENT": "true",
        "RANNC_DEPLOYMENT_FILE": str(folder / _CHOSEN),
        "RANNC_SAVE_GRAPH_PROFILE": "true",
        "RANNC_GRAPH_PROFILE_FILE": str(folder / _PROFILE),
    }
    done = run(options, job(options, "choosing", ["--warmup", "0", "--steps", "1"], environment), ends)
    if not (folder / _CHOSEN).exists():
        failures = [done.failure, *(result.get("failure", "") for result in done.results)]
        sys.exit(f"no plan was chosen: {' '.join(filter(None, failures))}\n{done.told}")


# Other plans


class Drawing:
    """Searches for other plans of the same model on the same devices, held to something."""

    def __init__(self, graph: Graph, options: argparse.Namespace, folder: Path) -> None:
        self._graph = graph
        self._options = options
        self._limit_bytes = int(options.memory_limit_gb * 2**30)
        self._random = random.Random(options.seed)
        self._profile = Profile.read(folder / _PROFILE)
        own = own_device(_device())
        ranks = [(own.name, own.memory_bytes, own.tf32, own.host)] * options.ranks
        self._cluster = Cluster.of_ranks(ranks).with_links(self._profile)
        chosen = Plan.read(folder / _CHOSEN)
        chosen.check(graph, options.ranks)
        self._known = {identity(chosen)}

    def next_best(self) -> list[Plan]:
        """The search's runners-up: they differ in replicas, microbatches or schedule."""
        found = self._search({"runners_up": self._options.next_best})
        others = [plan for plan in found if identity(plan) not in self._known]
        self._known.update(map(identity, others))
        return others

    def random_plans(self) -> list[Plan]:
        """Plans with random replicas and microbatches, half of them with the search's cuts."""
        found: list[Plan] = []
        for _ in range(_DRAWS):
            if len(found) == self._options.random:
                break
            for best in self._search(self._random_demand()):
                plan = self._moved(best) if self._random.random() < 0.5 else best
                if plan is not None and identity(plan) not in self._known:
                    self._known.add(identity(plan))
                    found.append(plan)
        return found

    def _moved(self, plan: Plan) -> Plan | None:
        """The plan with other cuts, if that is possible and fits."""
        for _ in range(_MOVES):
            try:
                moved = self._cut_elsewhere(content(plan))
            except (PlanError, PlanFileError):
                continue
            usable_bytes = (1 - _MARGIN) * self._limit_bytes
            if all(stage.predicted.memory.total_bytes <= usable_bytes for stage in PlanFacts.of(moved).stages):
                return moved
        return None

    def _cut_elsewhere(self, found: dict[str, Any]) -> Plan:
        stages = found["stages"]
        reach = int(_REACH * stages[-1]["ops"]["end"] / len(stages))
        for before, after in pairwise(stages):
            before["ops"]["end"] = after["ops"]["first"] = after["ops"]["first"] + self._random.randint(-reach, reach)
        blocks = [block for stage in stages for block in stage["blocks"]]
        for stage in stages:
            stage["blocks"] = _cut_blocks(blocks, stage["ops"]["first"], stage["ops"]["end"])
            del stage["feeds"]
        plan = Plan.seal(json.dumps(found))
        plan.partition(self._graph)
        return plan.predicted(self._graph, self._cluster, [self._profile], self._settings().to_json())

    def _random_demand(self) -> dict[str, Any]:
        ranks = self._options.ranks
        cuts = sorted(self._random.sample(range(1, ranks), self._random.randrange(ranks)))
        replicas = [end - start for start, end in pairwise([0, *cuts, ranks])]
        counts = [count for count in _MICROBATCHES if count <= self._options.rows]
        return {"replicas": tuple(replicas), "microbatches": self._random.choice(counts)}

    def _search(self, demand: dict[str, Any]) -> list[Plan]:
        """The best plan that meets a demand and fits, if there is one, and its runners-up if they are asked for."""
        settings = replace(self._settings(), **demand)
        try:
            return Plan.search_several(self._graph, self._cluster, [self._profile], settings.to_json())[0]
        except PlanError:
            return []

    def _settings(self) -> SearchSettings:
        options = self._options
        return SearchSettings(
            world_size=options.ranks,
            batch_rows=options.rows * options.ranks,
            memory_limit_bytes=self._limit_bytes,
            memory_margin=_MARGIN,
            loss_inside=loss_is_inside(options.model),
        )


def _cut_blocks(blocks: Sequence[dict[str, Any]], first: int, end: int) -> list[dict[str, Any]]:
    """The Blocks between two main Ops, cut there."""
    runs = [(max(first, block["ops"]["first"]), min(end, block["ops"]["end"]), block) for block in blocks]
    return [{**block, "ops": {"first": begin, "end": stop}} for begin, stop, block in runs if begin < stop]


def identity(plan: Plan) -> str:
    """What a plan decides, without what it predicts."""
    found = content(plan)
    stages = [{name: value for name, value in stage.items() if name != "predicted"} for stage in found["stages"]]
    return json.dumps([stages, found["microbatches"], found["schedule"]])


def write(plans: dict[str, list[Plan]], folder: Path) -> list[Path]:
    """The files of plans, named after their kind."""
    files = [folder / _CHOSEN]
    for kind, found in plans.items():
        for number, plan in enumerate(found, 1):
            files.append(folder / f"{kind} {number}.json")
            plan.write(files[-1])
    return files


# Times


def time_plans(options: argparse.Namespace, files: list[Path], ends: float) -> dict[str, dict[str, Any]]:
    """What each plan gives, by the name of its file. A plan that ends its run does not end the others."""
    results: dict[str, dict[str, Any]] = {}
    waiting = list(files)
    while waiting and time.monotonic() < ends:
        steps = ["--warmup", "3", "--steps", "6"]
        done = run(options, job(options, "timing", [*steps, "--plans", *map(str, waiting)], {}), ends)
        for result in done.results:
            results[result["plan_file"]] = result
        waiting = waiting[len(done.results) :]
        if waiting:
            results[waiting.pop(0).name] = {"failure": done.failure or "no result"}
    return results | {file.name: {"failure": "no time was left"} for file in waiting}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The plans, fastest first, and how far the chosen one is from the fastest."""
    lines = ["| | plan | predicted ms | measured ms | above the fastest |", "|---|---|--:|--:|--:|"]
    ran = {name: result for name, result in results.items() if "failure" not in result}
    if not ran:
        return "no plan ran: " + "; ".join(result["failure"] for result in results.values())
    fastest_ms = min(result["measured_ms"] for result in ran.values())
    for name, result in sorted(ran.items(), key=lambda item: item[1]["measured_ms"]):
        predicted, measured = result["predicted_ms"], result["measured_ms"]
        times = f"{predicted:.1f} | {measured:.1f} | {measured / fastest_ms - 1:.1%}"
        lines.append(f"| {Path(name).stem} | {result['plan']} | {times} |")
    lines.append("")
    if _CHOSEN in ran:
        above = ran[_CHOSEN]["measured_ms"] / fastest_ms - 1
        lines.append(f"The chosen plan is within {above:.1%} of the fastest of {len(ran)}.")
    lines += [f"- {Path(name).stem}: {result['failure']}" for name, result in results.items() if "failure" in result]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
