"""The list of Programs on which the machine's users agree, timed: what the machine prices beside what ranks measure.

    torchrun --standalone --nproc-per-node 2 -m benches.conformance

Runs the cases that are meant for so many ranks, with layers that are wide enough for their times to count, at prices
measured on these devices; prints a Markdown table. Started in the project's folder. A call without a backward has no
price. Who computes what in which order, and what travels, ``tests/conformance`` compares.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from unittest.mock import patch

import torch
from tests.conformance.programs import Case, Model, cases, planned

import pyrannc
from pyrannc._native import Cluster, Plan, Profile
from pyrannc.job import process
from pyrannc.ledger import Report
from pyrannc.planning import attempts
from pyrannc.planning.search import Request, search_settings, with_links


def main() -> int:
    options = parse()
    torch.backends.cuda.matmul.allow_tf32 = True
    joined = process.ensure_process_group()
    chosen = [case for case in cases() if case.world_size == joined.world_size and case.call != "forward"]
    chosen = chosen[: options.cases]
    if not chosen:
        print(f"the list has no case for {joined.world_size} ranks", file=sys.stderr)
        return 1
    lines, errors = [], []
    for case in chosen:
        report = trained(case, options)
        time = report.step_us
        assert time.error is not None, "steps were measured"
        errors.append(abs(time.error))
        lines.append(f"| {case} | {in_ms(time.predicted)} | {in_ms(time.measured)} | {time.error:+.1%} |")
        if joined.rank == 0:
            print(lines[-1], file=sys.stderr, flush=True)
            if options.report:
                print(report, file=sys.stderr, flush=True)
    if joined.rank == 0:
        print("| case | predicted ms | measured ms | error |\n|---|--:|--:|--:|")
        print("\n".join(lines))
        print(f"\n- error of time: mean {fmean(errors):.1%}, worst {max(errors):.1%}, over {len(errors)} cases")
    pyrannc.barrier()
    pyrannc.clear()
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="vectors of a row")
    parser.add_argument("--width", type=int, default=4096, help="of each layer")
    parser.add_argument("--steps", type=int, default=16, help="of each case; the ledger keeps the last ten")
    parser.add_argument("--cases", type=int, default=None, help="so many, the first of the list")
    parser.add_argument("--report", action="store_true", help="print the ledger of each case to stderr")
    return parser.parse_args()


def in_ms(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us / 1e3:.2f}"


def trained(case: Case, options: argparse.Namespace) -> Report:
    """What is known of some steps of a case."""
    device = process.ensure_process_group().device
    torch.manual_seed(0)
    module = Model(case.model, len(case.replicas), inside=case.call == "whole", width=options.width)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    x = torch.randn(case.rows[process.get_rank()], options.tokens, options.width, device=device)
    level = "3" if any("params" in level for level in case.divided) else "off"
    with taken(case), patch.dict(os.environ, {"RANNC_ENABLE_ZERO": level}):
        model = pyrannc.RaNNCModule(module, optimizer)
        for _ in range(options.steps + 1):
            optimizer.zero_grad()
            made = model(x)
            loss = made[0] if isinstance(made, tuple) else made.square().mean()
            loss.backward()
            optimizer.step()
        report = model.report()
    model.undeploy()
    return report


@contextmanager
def taken(case: Case) -> Iterator[None]:
    """A search finds the Plan of the case, at the prices that it is given."""

    def search(request: Request, cluster: Cluster, profiles: Sequence[Profile], world_size: int) -> Plan:
        graph, linked = request.variant.graph, with_links(cluster, profiles)
        asked = search_settings(request, world_size)
        return planned(case, graph).predicted(graph, linked, list(profiles), asked.to_json())

    with patch.object(attempts, "search", search):
        yield


if __name__ == "__main__":
    sys.exit(main())
