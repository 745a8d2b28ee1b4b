"""What a script says of how its model is captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CaptureOptions:
    """Said once for all calls.

    Attributes:
        leaf_modules: paths of sub-modules that stay whole, as one opaque op per call.
        row_wise_modules: paths of sub-modules that stay whole, and treat each row by itself.
        allow_uncut: where nothing smaller helps, the whole model may be one opaque op.
        outputs: keys, attributes or positions of what a training call is to return; ``None``: all of it.
    """

    leaf_modules: tuple[str, ...] = ()
    row_wise_modules: tuple[str, ...] = ()
    allow_uncut: bool = False
    outputs: tuple[str | int, ...] | None = None

    @property
    def kept_whole(self) -> tuple[str, ...]:
        """All sub-modules that the script keeps whole."""
        return self.leaf_modules + self.row_wise_modules


NO_OPTIONS = CaptureOptions()
