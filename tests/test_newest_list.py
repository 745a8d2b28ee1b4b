"""The tests that ``make test-torch-newest`` runs are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_that_is_listed_is_found() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--collect-only", "--quiet"]
    found = subprocess.run(
        [*command, "@tests/torch_newest.txt"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
