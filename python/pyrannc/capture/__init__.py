"""Capture of unmodified PyTorch models: one call of a model becomes a Graph."""

from pyrannc.errors import CaptureError

from .captured import Captured, capture, signature
from .dims import Dim
from .flatten import Structure, batch_rows, flatten
from .oracle import Assumption
from .source import Place

__all__ = [
    "Assumption",
    "CaptureError",
    "Captured",
    "Dim",
    "Place",
    "Structure",
    "batch_rows",
    "capture",
    "flatten",
    "signature",
]
