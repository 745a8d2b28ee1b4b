"""Compiled code of former starts, which was checked there: found without a trace, by all that it was made from."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from pyrannc.blocks.backward_parts import BackwardParts
from pyrannc.blocks.compiled import Kernels, SpanCode
from pyrannc.blocks.form import Form
from pyrannc.blocks.joint import Ends, Seen
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.span import SpanFunction
from pyrannc.capture.torch_internals.compiler import kept_kernels, key_of_kernels, state_of_compiler
from pyrannc.files import write_atomically
from pyrannc.log import get_logger

_log = get_logger("RaNNCModule")


@dataclass(frozen=True)
class _Kept:
    """What is in a file: a code, with the names under which torch keeps its kernels."""

    ends: Ends
    forward: str
    backward: BackwardParts[str] | None


class _Gone(Exception):
    """Torch has no such kernels."""


class KeptCode:
    """Code in a folder that only this user can write to.

    Args:
        folder: where it is; without one, nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder and folder / "spans"

    @property
    def holds_any(self) -> bool:
        """True when code of an earlier start is there, of whatever model."""
        try:
            return self._folder is not None and any(self._folder.iterdir())
        except OSError:
            return False

    def file_of(
        self, function: SpanFunction, form: Form, seen: Seen, device: torch.device, conditions: object
    ) -> Path | None:
        """The file of a Span's code for a form; None where nothing is kept, or no text tells it from others.

        Args:
            conditions: what kernels depend on beside what they compute.
        """
        if self._folder is None:
            return None
        try:
            text, compiler = function.text, state_of_compiler()
        except Exception:  # whatever another torch makes of private names
            _log.debug("compiled code is not kept", exc_info=True)
            return None
        if text is None or compiler is None:
            return None
        draws = [(draw.numel, threshold) for draw, threshold in seen.lifted.draws]
        whole = (
            text, form, draws, seen.lifted.placed, seen.gives, seen.taken, str(device), conditions,
            torch.get_default_dtype(), _hash_of_sources(), compiler,
        )  # fmt: skip
        return self._folder / hashlib.sha256(repr(whole).encode()).hexdigest()

    @staticmethod
    def find(
        file: Path | None, function: SpanFunction, form: Form, seen: Seen, numbers: int, randomness: Randomness
    ) -> SpanCode | None:
        """The code in a file; None where there is none, or none that can be read."""
        if file is None:
            return None
        try:
            kept: _Kept = pickle.loads(file.read_bytes())
            forward = _kernels(kept.forward)
            backward = None if kept.backward is None else kept.backward.mapped(_kernels_of_backward)
        except (FileNotFoundError, _Gone):
            return None
        except Exception:  # whatever reading raises of a file that was cut off
            _log.debug("compiled code cannot be read", exc_info=True)
            return None
        return SpanCode(form, kept.ends, seen.lifted, forward, backward, function.call, numbers, randomness)

    @staticmethod
    def put(file: Path | None, code: SpanCode) -> None:
        """Keeps a code, if torch has kept its kernels."""
        if file is None:
            return
        try:
            backward = None if code.backward is None else code.backward.mapped(_key)
            kept = _Kept(code.ends, _key(code.forward), backward)
            file.parent.mkdir(exist_ok=True, mode=0o700)
            write_atomically(file, pickle.dumps(kept))
        except Exception:  # what torch has not kept, or a disk cannot hold; nothing depends on it
            _log.debug("compiled code is not kept", exc_info=True)


def _kernels(key: str, *, backward: bool = False) -> Kernels:
    found = kept_kernels(key, backward=backward)
    if found is None:
        raise _Gone
    return found


def _kernels_of_backward(key: str) -> Kernels:
    return _kernels(key, backward=True)


def _key(kernels: Kernels) -> str:
    found = key_of_kernels(kernels)
    if found is None:
        raise _Gone
    return found


@cache
def _hash_of_sources() -> str:
    """That of this package's code, which decides what is compiled."""
    found = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        found.update(f"{path.relative_to(package)} {len(text)} ".encode() + text)
    return found.hexdigest()
