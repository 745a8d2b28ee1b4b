"""Capture of unmodified PyTorch models: one call of a model becomes a Graph."""

from pyrannc.errors import CaptureError

from .assumptions import FROM_ARGUMENTS, Answering, Assumption, Attribute, PartOfBatchError, PythonState, Question
from .attributes import INTERNAL
from .captured import Captured, capture, capture_sample, signature
from .dims import Dim
from .flatten import Structure, batch_rows, by_extents, flatten
from .lengths import FixedLengthError, LengthTrace
from .options import NO_OPTIONS, CaptureOptions
from .plain import is_plain
from .reading import can_be_traced, first_that_may_lack_rows
from .sample import Sample
from .source import Part, Place
from .tracer import Trace, Tracing, trace
from .untraceable import KeptWhole

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
