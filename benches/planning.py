"""How long planning takes, from captured graphs with roofline costs; needs no GPU.

    python benches/planning.py --graphs /tmp/graphs [--cases bert-24-on-8 t5-3b-on-32]

Captured graphs are kept in the folder and used again. Each capture and each search is a process of its own, so that its
time and peak memory are its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plans import describe

from pyrannc.core.plan import PlanFacts
from pyrannc.core.settings import Capabilities, Limits, SearchSettings

_SAMPLE_ROWS = 3
_GIB = 2**30


@dataclass(frozen=True)
class Model:
    """What is captured.

    Attributes:
        family: one of :mod:`models`.
        layers: of the model, by which its capture time is divided.
    """

    family: str
    sizes: tuple[int, ...]
    layers: int


@dataclass(frozen=True)
class Case:
    """What is planned.

    Attributes:
        model: one of :data:`MODELS`.
        device: a preset.
        batch_rows: of the global batch.
        settings: more of the search's Settings.
        link_gb_per_s: of all links; those of the preset when not given.
    """

    model: str
    device: str
    nodes: int
    devices_per_node: int
    batch_rows: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    link_gb_per_s: float | None = None


MODELS = {
    "bert-tiny": Model("bert", (16, 64, 32), 16),
    "bert-24": Model("bert", (24, 1024, 512), 24),
    "bert-96": Model("bert", (96, 1024, 512), 96),
    "bert-256": Model("bert", (256, 1024, 512), 256),
    "bert-1024": Model("bert", (1024, 1024, 512), 1024),
    "bert-4.9b": Model("bert", (96, 2048, 512), 96),
    "bert-100b": Model("bert", (80, 10240, 512), 80),
    "t5-3b": Model("t5", (24, 1024, 16384, 32, 128, 512), 48),
    "resnet152x8": Model("resnet152", (8, 224), 152),
    "unet3d": Model("unet3d", (32, 6, 160, 288, 288), 22),
}

RECOMPUTED = {"capabilities": Capabilities(recompute=True)}
DIVIDED = {"capabilities": Capabilities(sharding="params")}
"""Replicas may divide anything, Stage by Stage."""
AS_TRAINED = {"limits": Limits(time_ms=60_000), "split_backward": True}
"""As by default in trainings."""
MANY_STAGES = {"stages": 12}
FROM_ONE_RANK = {"gather_inputs": False}
"""Microbatches may then have fewer rows than there are ranks."""

CASES = {
    "bert-tiny on 16 slow H200, 12 stages": Case("bert-tiny", "H200", 1, 16, 256, MANY_STAGES, 1.0),
    "bert-24 on 8 H200": Case("bert-24", "H200", 1, 8, 256),
    "bert-96 on 32 H200": Case("bert-96", "H200", 4, 8, 1024),
    "bert-256 on 32 H200": Case("bert-256", "H200", 4, 8, 1024),
    "bert-256 on 32 H200, ZeRO": Case("bert-256", "H200", 4, 8, 1024, DIVIDED),
    "bert-256 on 256 H200": Case("bert-256", "H200", 32, 8, 4096),
    "bert-1024 on 1024 H200": Case("bert-1024", "H200", 128, 8, 8192),
    "bert-1024 on 1024 H200, ZeRO": Case("bert-1024", "H200", 128, 8, 8192, DIVIDED),
    "bert-1024 on 10240 H200, as trained": Case("bert-1024", "H200", 1280, 8, 81920, AS_TRAINED),
    "bert-4.9b on 32 V100": Case("bert-4.9b", "V100", 4, 8, 256, RECOMPUTED),
    "resnet152x8 on 32 V100": Case("resnet152x8", "V100", 4, 8, 512),
    "t5-3b on 32 V100": Case("t5-3b", "V100", 4, 8, 256),
    "unet3d on 8 H200": Case("unet3d", "H200", 1, 8, 16),
    "unet3d on 32 V100": Case("unet3d", "V100", 4, 8, 32, FROM_ONE_RANK),
    "bert-100b on 64 A100": Case("bert-100b", "A100-80G", 8, 8, 512, FROM_ONE_RANK | RECOMPUTED),
}


def main() -> int:
    options = parse()
    if options.capture:
        capture(options.capture, options.graphs)
        return 0
    if options.search:
        search(CASES[options.search], options.graphs)
        return 0
    options.graphs.mkdir(parents=True, exist_ok=True)
    lines = [row(HEADER), row(["---", *["--:"] * (len(HEADER) - 1)])]
    print("\n".join(lines), flush=True)
    failures = 0
    for name in options.cases:
        try:
            print(row([name, *measure(name, options)]), flush=True)
        except Failed as failure:
            failures += 1
            print(row([name, str(failure), *[""] * (len(HEADER) - 2)]), flush=True)
    return int(failures > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, help="folder of captured graphs")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a capture or a search")
    parser.add_argument("--capture", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--search", choices=list(CASES), help=argparse.SUPPRESS)
    return parser.parse_args()


class Failed(Exception):
    """A capture or a search failed; the text says why."""


@dataclass(frozen=True)
class Ran:
    """A process that has ended well."""

    stdout: str
    seconds: float
    peak_bytes: int


def run(command: Sequence[str], timeout_s: float) -> Ran:
    """Runs a program to its end.

    Raises:
        Failed: it fails or takes longer.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode != 0:
            told = stderr.read().strip().splitlines() or [f"ended with status {process.returncode}"]
            raise Failed(told[-1] if seconds < timeout_s else f"stopped after {seconds:.0f} s")
        return Ran(stdout.read(), seconds, usage.ru_maxrss * 1024)


# Capture


def captured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The facts of a model's capture; made, with the graph file, unless the folder has both."""
    graph, facts = options.graphs / f"{name}.json", options.graphs / f"{name}.facts.json"
    if not (graph.exists() and facts.exists()):
        ran = run([sys.executable, __file__, "--graphs", str(options.graphs), "--capture", name], options.timeout)
        facts.write_text(json.dumps(json.loads(ran.stdout) | {"peak_bytes": ran.peak_bytes}))
    content: dict[str, Any] = json.loads(facts.read_text())
    return content


def capture(name: str, folder: Path) -> None:
    """Captures a model without memory for its parameters, writes the graph, and prints the facts as JSON."""
    import torch
    from models import make_batch, make_model

    from pyrannc import capture as capturing

    model = MODELS[name]
    with torch.device("meta"):
        module = make_model(model.family, list(model.sizes), 0)
    batch = make_batch(model.family, _SAMPLE_ROWS, list(model.sizes), 0, 0)
    started, started_cpu = time.perf_counter(), time.process_time()
    found = capturing.capture(module, (), batch, device=torch.device("cuda", 0), rows=_SAMPLE_ROWS)
    taken = {"capture_s": time.perf_counter() - started, "cpu_s": time.process_time() - started_cpu}
    (folder / f"{name}.json").write_text(found.graph_json)
    params = sum(param.numel() for param in module.parameters())
    print(json.dumps(taken | {"ops": len(found.op_nodes), "params": params}))


# Search


HEADER = [
    "case",
    "parameters",
    "ops",
    "capture s",
    "of a processor",
    "ms a layer",
    "capture GiB",
    "blocks (kinds)",
    "read ms",
    "search ms",
    "of all processors",
    "search GiB",
    "plans covered",
    "a ms",
    "plans without blocks",
    "gap",
    "step ms",
    "plan",
]


def search(case: Case, folder: Path) -> None:
    """Plans from a graph file, with roofline costs, and prints the plan and times as JSON."""
    from pyrannc._native import Cluster, Graph, Plan

    started = time.perf_counter()
    graph = Graph.from_json((folder / f"{case.model}.json").read_text())
    read = time.perf_counter()
    settings = SearchSettings(case.nodes * case.devices_per_node, case.batch_rows, **case.settings)
    cluster = Cluster.preset(case.device, case.nodes, case.devices_per_node)
    if case.link_gb_per_s is not None:
        text = re.sub(r"^((?:collective_)?gb_per_s) = .*", rf"\1 = {case.link_gb_per_s}", cluster.to_toml(), flags=re.M)
        cluster = Cluster.from_toml(text)
    started_cpu = time.process_time()
    (plan,), report = Plan.search_several(graph, cluster, [], settings.to_json())
    taken = {"search_s": time.perf_counter() - read, "cpu_s": time.process_time() - started_cpu}
    facts = PlanFacts.of(plan)
    found = {"plan": describe(facts), "step_us": facts.predicted.step_us, "world_size": facts.world_size}
    print(json.dumps(found | {"report": json.loads(report), "read_s": read - started} | taken))


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """A row of the table, from its second cell on."""
    case = CASES[name]
    facts = captured(case.model, options)
    ran = run([sys.executable, __file__, "--graphs", str(options.graphs), "--search", name], options.timeout)
    found = json.loads(ran.stdout)
    report, search_ms = found["report"], found["search_s"] * 1e3
    covered = math.log10(report["plans_covered"])
    return [
        f"{facts['params'] / 1e9:.2f} B",
        f"{facts['ops']:,}",
        f"{facts['capture_s']:.1f}",
        f"{facts['cpu_s']:.1f}",
        f"{facts['cpu_s'] / MODELS[case.model].layers * 1e3:.0f}",
        f"{facts['peak_bytes'] / _GIB:.2f}",
        f"{report['blocks']} ({report['block_kinds']})",
        f"{found['read_s'] * 1e3:.0f}",
        f"{search_ms:.0f}",
        f"{found['cpu_s'] * 1e3:.0f}",
        f"{ran.peak_bytes / _GIB:.2f}",
        power(covered),
        power(covered - math.log10(search_ms)),
        power(plans(facts["ops"], found["world_size"])),
        f"{report['gap']:.1%}" + ("" if report["stop"] == "complete" else f" (limit: {report['stop']})"),
        f"{found['step_us'] / 1e3:.1f}",
        found["plan"],
    ]


def plans(pieces: int, devices: int) -> float:
    """Common logarithm of the number of plans, for one number of microbatches, when a stage may end after any piece.

    A plan with S stages chooses S - 1 of the pieces - 1 cuts, and as many of the devices - 1 ways to divide the devices
    in order. The sum over S of C(pieces - 1, S - 1) C(devices - 1, S - 1) is C(pieces + devices - 2, devices - 1).
    """
    total, chosen = pieces + devices - 2, devices - 1
    logarithm = math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
    return logarithm / math.log(10)


def power(logarithm: float) -> str:
    return f"10^{logarithm:.1f}"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
