"""Which gradients are summed together, over which ranks and in which order, as the native core decided it.

The classes mirror the core's JSON (crates/plan: ``Buckets``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketFacts:
    """Gradients that are summed together.

    Attributes:
        group: place of the ranks among the groups.
        params: places of the parameters among the Graph's, in the order in which their gradients come.
        sharding: what the group divides among its ranks: ``"none"``, ``"optimizer"``, ``"gradients"``,
            ``"kept_params"`` or ``"params"``.
        parts: where anything is divided, how many elements each rank of the group has; together at least all.
        span: where the parameters are divided, the place of the Span that alone uses them among its Stage's.
    """

    group: int
    params: tuple[int, ...]
    sharding: str
    parts: tuple[int, ...]
    span: int | None

    @property
    def is_spread(self) -> bool:
        """Each rank keeps a part of the sums."""
        return self.is_gathered or self.sharding == "gradients"

    @property
    def is_gathered(self) -> bool:
        """Each rank keeps a part of the parameters."""
        return self.sharding in ("kept_params", "params")

    @property
    def is_kept(self) -> bool:
        """What has been gathered of the parameters stays whole to the end of a run."""
        return self.sharding == "kept_params"

    def of(self, names: Sequence[str]) -> list[str]:
        """The names of its parameters, given those of the Graph's."""
        return [names[param] for param in self.params]


@dataclass(frozen=True)
class BucketsFacts:
    """All gradients of a deployed model.

    Attributes:
        groups: of ranks, increasing: first those of each Stage, then others that hold the same parameters.
        buckets: in the order in which they are summed.
    """

    groups: tuple[tuple[int, ...], ...]
    buckets: tuple[BucketFacts, ...]

    @staticmethod
    def from_json(text: str) -> BucketsFacts:
        """Reads the core's ``Buckets``."""
        found = json.loads(text)
        return BucketsFacts(
            groups=tuple(tuple(ranks) for ranks in found["groups"]),
            buckets=tuple(
                BucketFacts(item["group"], tuple(item["params"]), item["sharding"], tuple(item["parts"]), item["span"])
                for item in found["buckets"]
            ),
        )
