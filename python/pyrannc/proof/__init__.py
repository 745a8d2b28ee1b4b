"""Whether a training call on all ranks equals the same call in one process."""

from .prove import listen, prove
from .verdict import Verdict

__all__ = ["Verdict", "listen", "prove"]
