"""A program: a habit's script in a job of its own, which it may end in any way.

python -m tests.contract.apart NAME ROWS...
"""

from __future__ import annotations

import sys

import pyrannc
from tests.runtime.equivalence import double_precision

from .habits import HABITS
from .job import RankJob


def main() -> None:
    name, *rows = sys.argv[1:]
    with double_precision():
        HABITS[name].script(RankJob(pyrannc.get_rank(), tuple(map(int, rows))))


if __name__ == "__main__":
    main()
