"""Hooks of gradients in a forward that need the gradients of all rows, where these come in parts."""

from __future__ import annotations

from pyrannc.capture import Captured
from pyrannc.capture.nodes.leaf import GradientHook
from pyrannc.core.partition import StagePart
from pyrannc.core.program import RankProgram
from pyrannc.errors import CaptureError


def refuse_gradients_in_parts(captured: Captured, part: StagePart, program: RankProgram) -> None:
    """Finds out that hooks of this rank's Stage make the same of a part of the batch as of all of it.

    Raises:
        CaptureError: one of them does not, and this rank has a part of the batch at a time.
    """
    if program.call == "forward" or all(hi - lo == program.total_rows for lo, hi in program.rows):
        return
    for op in part.ops:
        call = captured.op_nodes[op].target
        if isinstance(call, GradientHook) and not call.takes_parts:
            raise CaptureError(
                f"a hook of gradients at {captured.place(op)} makes something else of the gradients of some rows than "
                "of those of the whole batch, as with a norm or a mean of them, and the batch comes in parts: let it "
                "treat each row by itself, change gradients of parameters after backward() instead, or let each part "
                'stand for itself: RaNNCModule(..., row_mixing="microbatch")'
            )
