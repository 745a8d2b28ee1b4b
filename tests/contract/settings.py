"""Plans and divisions of rows that habits are run under."""

from __future__ import annotations

import os
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Setting:
    """How a job is divided.

    Attributes:
        rows: of each rank's batch, :data:`~tests.contract.job.ROWS` together; its length is the number of ranks.
        stages: forced number of Stages; 0 leaves it to the search.
        microbatches: forced number of microbatches; 0 leaves it to the search.
        zero: what Replicas divide, as ``enable_zero`` of the configuration says it.
    """

    rows: tuple[int, ...]
    stages: int
    microbatches: int
    zero: str = "off"

    @property
    def environment(self) -> dict[str, str]:
        forced = {"RANNC_PARTITION_NUM": str(self.stages), "RANNC_PIPELINE_NUM": str(self.microbatches)}
        return forced if self.zero == "off" else {**forced, "RANNC_ENABLE_ZERO": self.zero}

    def __str__(self) -> str:
        divided = "" if self.zero == "off" else f", ZeRO {self.zero}"
        rows = "+".join(map(str, self.rows))
        return f"{self.stages} Stages, {self.microbatches} microbatches, rows {rows}{divided}"


REPLICAS = Setting((5, 3), 1, 2)
STAGES = Setting((4, 4), 2, 1)
PIPELINE = Setting((7, 1), 2, 4)
EMPTY = Setting((8, 0), 2, 2)
MIXED = Setting((3, 0, 5), 2, 2)

COVERING = (REPLICAS, STAGES, PIPELINE, MIXED)
"""Each kind of Plan and of rows at least once."""

DIVIDED = (REPLICAS, PIPELINE, MIXED)
"""Rows of a batch are computed in several parts."""

TOGETHER = (STAGES, Setting((5, 3), 2, 1), Setting((8, 0), 2, 1))
"""All rows of the global batch are computed together."""

UNCUT = (Setting((5, 3), 1, 1), Setting((3, 0, 5), 1, 1))
"""One Stage and one microbatch, for models that stay in one piece."""

FREE = (Setting((4, 4), 0, 0), Setting((2, 0, 6), 0, 0))
"""The search chooses."""

NOT_WHOLE = (STAGES, Setting((3, 0, 5), 2, 2), Setting((5, 3), 1, 2, zero="2"))
"""Some ranks have none of a gradient, or a part."""

ONCE = (REPLICAS, STAGES)
"""For what does not depend on the Plan, such as refusals."""

SPREAD = (
    Setting((8,), 1, 1),
    Setting((8,), 1, 4),
    Setting((5, 3), 1, 2),
    Setting((3, 3, 2), 1, 1),
    Setting((3, 0, 5), 1, 4),
    Setting((7, 1), 2, 4),
    Setting((8, 0), 2, 2),
    Setting((3, 3, 2), 2, 2),
    Setting((3, 0, 5), 3, 1),
    Setting((3, 3, 2), 3, 4),
)
"""1, 2 and 3 Replicas, 1, 2 and 4 microbatches, 1 to 3 Stages."""

_TRIED = os.environ.get("CONTRACT", "")
_ALL_ROWS = ((8,), (4, 4), (7, 1), (8, 0), (3, 3, 2), (3, 0, 5))


def tried(name: str, settings: tuple[Setting, ...], *, alike: bool = False) -> tuple[Setting, ...]:
    """The settings that a habit of this name is tried under.

    One of its own, by name, so that many habits are under each; all of them with ``CONTRACT=covering``. With
    ``CONTRACT=all``, where those are the covering choice, the whole product.

    Args:
        alike: runs are held against each other, so there are two.
    """
    if _TRIED not in ("covering", "all"):
        place = crc32(name.encode())
        return tuple(settings[(place + other) % len(settings)] for other in range(1 + alike))
    if settings is not COVERING or _TRIED == "covering":
        return settings
    return tuple(
        Setting(rows, stages, microbatches)
        for rows in _ALL_ROWS
        for stages in range(1, len(rows) + 1)
        for microbatches in (1, 2, 4)
    )
