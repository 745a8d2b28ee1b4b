"""Programs that run Triton's kernels in its interpreter, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys


def interpreted(module: str) -> list[str]:
    """The words that a program prints, run by itself: the interpreter is asked for before Triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-m", module], env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()
