"""What a script says of how its model is captured."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from pyrannc.errors import CaptureError

from .user.source import Part


@dataclass(frozen=True)
class CaptureOptions:
    """Said once for all calls.

    Attributes:
        leaf_modules: paths of sub-modules that stay whole, as one opaque op per call; ``*`` stands for anything.
        row_wise_modules: likewise, of sub-modules that treat each row by itself.
        allow_uncut: where nothing smaller helps, the whole model may be one opaque op.
        outputs: keys, attributes or positions of what a training call is to return; ``None``: all of it.
    """

    leaf_modules: tuple[str, ...] = ()
    row_wise_modules: tuple[str, ...] = ()
    allow_uncut: bool = False
    outputs: tuple[str | int, ...] | None = None

    def of(self, model: nn.Module) -> CaptureOptions:
        """The same for a model, with its sub-modules' paths for patterns such as ``layers.*.experts``.

        Raises:
            CaptureError: the model has none of a name, or none that can be called.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        whole = _expanded("leaf_modules", self.leaf_modules, modules)
        by_itself = _expanded("row_wise_modules", self.row_wise_modules, modules)
        own = [path for path in by_itself if path not in whole]
        outermost = tuple(path for path in own if not any(path.startswith(f"{other}.") for other in own))
        return replace(self, leaf_modules=whole, row_wise_modules=outermost)


def _expanded(option: str, names: Sequence[str], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        part = Part.of(name)
        path = part.path
        like = fnmatch.filter(modules, path) if "*" in path else [name] * (path in modules)
        if not like:
            raise CaptureError(f"{option}: the model has no sub-module '{path}'")
        if name == path and not any(_has_forward(modules[each]) for each in like):
            kind = type(modules[like[0]]).__name__
            raise CaptureError(
                f"{option}: sub-module '{path}' is a {kind}, which has no forward, so nothing ever calls it: name what "
                f"is called, '{path}.*' or the sub-module that holds it"
            )
        found += like
    return tuple(dict.fromkeys(found))


def _has_forward(module: nn.Module) -> bool:
    """False for a list of modules and the like."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


NO_OPTIONS = CaptureOptions()
