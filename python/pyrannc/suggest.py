"""The name that was probably meant."""

import difflib
from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    """Return the end of an error message that names the known name nearest to ``name``; empty if none is near.

    Args:
        name: what was given.
        known: what could have been.
        spelled: a known name as the message has it.

    >>> nearest("mem_limit", ["mem_limit_gb", "mem_margin"])
    "; did you mean 'mem_limit_gb'?"
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {spelled(matches[0])!r}?" if matches else ""
