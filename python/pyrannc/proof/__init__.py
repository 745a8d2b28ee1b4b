"""Whether a training call on all ranks equals the same call in one process."""

from .once import Comparison, compare_once
from .prove import listen, prove
from .verdict import Verdict

__all__ = ["Comparison", "Verdict", "compare_once", "listen", "prove"]
