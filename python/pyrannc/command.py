"""Entry point of the ``rannc`` command. Only ``capture`` and ``calibrate`` need torch."""

import sys

from pyrannc import _native


def main() -> int:
    """Run ``rannc`` with this process's arguments and return its exit status."""
    match sys.argv[1:]:
        case ["capture", *argv]:
            from pyrannc.capture.command import main as capture

            return capture(argv)
        case ["calibrate", *argv]:
            from pyrannc.calibrate.command import main as calibrate

            return calibrate(argv)
    return _native.run_cli(sys.argv)
