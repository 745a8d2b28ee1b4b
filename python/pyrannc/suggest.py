"""The name that was probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that names the known name nearest to ``name``; empty if none is near.

    >>> nearest("mem_limit", ["mem_limit_gb", "mem_margin"])
    "; did you mean 'mem_limit_gb'?"
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
