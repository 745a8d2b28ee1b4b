"""Entry point of the ``rannc`` command. Works without torch."""

import sys

from pyrannc import _native


def main() -> int:
    """Run ``rannc`` with this process's arguments and return its exit status."""
    return _native.run_cli(sys.argv)
