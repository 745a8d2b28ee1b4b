"""What a rank's Stage works with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Parts
from pyrannc.core.program import RankProgram
from pyrannc.job.exchange import Group
from pyrannc.runtime.by_hosts import ByHosts
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.exchanges import Exchanges
from pyrannc.runtime.position import ActionRecord
from pyrannc.runtime.prologue import PrologueCode
from pyrannc.runtime.tail import TailCode
from pyrannc.runtime.timing import Timing
from pyrannc.store.gradients import Gradients
from pyrannc.store.working_copies import Key


@dataclass
class StageContext:
    """What a rank's Stage works with, from deployment to deployment.

    Attributes:
        code: what runs for each microbatch.
        prologue: what runs once a step.
        tail: of the captured call, if it has one.
        params: leaves by Value id.
        copies: of them, the working copies, by first name of the parameter.
        copied: what they are copies of, by Value id.
        stage_params: first names of the Stage's parameters.
        buffers: the Stage's buffers and constants by Value id.
        stage_of: the Stage of each rank.
        exchanges: between the ranks' own batches and the Stages.
        by_hosts: where code stays whole: other channels and exchanges, which it may need.
        totals: over which outputs without rows are summed, beside all other messages; without it after them.
        rehearsed: programs whose kernels have been loaded, by ``id``, which none has after one of them has gone.
    """

    facts: GraphFacts
    parts: Parts
    stage: int
    code: StageCode
    prologue: PrologueCode | None
    tail: TailCode | None
    params: Mapping[int, Tensor]
    copies: Mapping[str, Tensor]
    copied: Mapping[int, Key]
    stage_params: frozenset[str]
    buffers: Mapping[int, Tensor]
    stage_of: Sequence[int]
    channels: Channels
    exchanges: Exchanges
    gradients: Gradients
    randomness: Randomness
    record: ActionRecord
    timing: Timing
    device: torch.device
    totals: Group | None
    by_hosts: ByHosts | None = None
    rehearsed: dict[int, RankProgram] = field(default_factory=dict)

    @property
    def seeds_generator(self) -> bool:
        """True when some Op draws from the device's generator."""
        return any(code.seeds_generator for code in self._codes)

    @property
    def seeds_others(self) -> bool:
        """True when some Op draws from those of Python and NumPy, too."""
        return any(code.seeds_others for code in self._codes)

    @property
    def _codes(self) -> list[StageCode | TailCode]:
        prologue = [] if self.prologue is None else [self.prologue.code]
        return [self.code, *prologue, *([] if self.tail is None else [self.tail])]

    def forget_messages(self) -> None:
        """Drops what a recording that failed had under way: nothing has moved."""
        self.channels.forget_sends()
        self.gradients.forget_sums()
        for bucket in self.gradients.gathered.values():
            bucket.forget_gathers()
