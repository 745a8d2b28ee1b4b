"""Capture of unmodified PyTorch models: one call of a model becomes a Graph."""

from pyrannc.errors import CaptureError

from .captured import Captured, capture, capture_sample, signature
from .nodes.dims import Dim
from .nodes.untraceable import KeptWhole
from .options import NO_OPTIONS, CaptureOptions
from .reads.assumptions import FROM_ARGUMENTS, Answering, Assumption, Attribute, PartOfBatchError, PythonState, Question
from .rows.lengths import FixedLengthError, LengthTrace
from .rows.reading import can_be_traced, first_that_may_lack_rows
from .trace.attributes import INTERNAL
from .trace.sample import Sample
from .trace.tracer import Trace, Tracing, trace
from .user.flatten import Structure, batch_rows, by_extents, flatten
from .user.plain import is_plain
from .user.source import Part, Place

__all__ = [
    "FROM_ARGUMENTS",
    "INTERNAL",
    "NO_OPTIONS",
    "Answering",
    "Assumption",
    "Attribute",
    "CaptureError",
    "CaptureOptions",
    "Captured",
    "Dim",
    "FixedLengthError",
    "KeptWhole",
    "LengthTrace",
    "Part",
    "PartOfBatchError",
    "Place",
    "PythonState",
    "Question",
    "Sample",
    "Structure",
    "Trace",
    "Tracing",
    "batch_rows",
    "by_extents",
    "can_be_traced",
    "capture",
    "capture_sample",
    "first_that_may_lack_rows",
    "flatten",
    "is_plain",
    "signature",
    "trace",
]
