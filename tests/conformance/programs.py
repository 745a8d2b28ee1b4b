"""The list of Programs on which the machine's users agree: its cases, and how each is built in Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pyrannc._native import Graph, Plan
from tests.runtime.plans import cut_plan, divided, scheduled

LIST = Path(__file__).with_name("programs.txt")


@dataclass(frozen=True)
class Case:
    """A Program of the list, and what the machine tells of each rank."""

    model: str
    replicas: tuple[int, ...]
    microbatches: int
    rows: tuple[int, ...]
    schedule: str
    call: str
    divided: tuple[str, ...]
    told: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return sum(self.replicas)

    def __str__(self) -> str:
        stages, rows = "+".join(map(str, self.replicas)), "+".join(map(str, self.rows))
        divided = "+".join(self.divided)
        return f"{self.model}-{stages}-{self.microbatches}mb-{rows}rows-{self.schedule}-{self.call}-{divided}"


def cases() -> list[Case]:
    found: list[Case] = []
    for block in LIST.read_text().split("\n\n", 1)[1].strip().splitlines():
        if block[:1].isalpha():
            fields = [part.strip() for part in block.split(",")]
            model, replicas, microbatches, rows, schedule, call = fields[:6]
            counts = [tuple(map(int, numbers.split())) for numbers in (replicas, rows)]
            divided = tuple(fields[6].split()) if len(fields) > 6 else ("none",) * len(counts[0])
            found.append(Case(model, counts[0], int(microbatches), counts[1], schedule, call, divided, ()))
        elif block:
            last = found.pop()
            found.append(Case(**{**vars(last), "told": (*last.told, block)}))
    return found


class Model(nn.Module):
    """Two Ops a Stage, of the kind that the list names."""

    def __init__(self, kind: str, stages: int, *, inside: bool, width: int) -> None:
        super().__init__()
        self.kind, self.inside = kind, inside
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(stages))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(stages if kind == "wide" else 0))
        if kind == "tied":
            self.left[-1].weight, self.left[-1].bias = self.left[0].weight, self.left[0].bias

    def forward(self, x: Tensor) -> Any:
        left = right = x
        for stage, layer in enumerate(self.left):
            left = layer(left)
            if self.kind == "wide":
                right = self.right[stage](right)
            else:
                left = right = left.tanh()
        made = left + right if self.kind == "wide" else right
        return (made.square().mean(), made) if self.inside else made


def planned(case: Case, graph: Graph) -> Plan:
    """The Plan of a case, for a model of its kind."""
    ends = [sum(case.replicas[: stage + 1]) for stage in range(len(case.replicas))]
    ranks = [list(range(end - count, end)) for end, count in zip(ends, case.replicas, strict=True)]
    cuts = [2 * stage for stage in range(1, len(case.replicas))]
    listed = [order.strip() for order in case.schedule.split("/")]
    plan = divided(cut_plan(graph, cuts, ranks, case.microbatches, sum(case.rows)), case.divided)
    return scheduled(plan, listed if "F0" in case.schedule else case.schedule)
