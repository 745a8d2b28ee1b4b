"""Entry point of the ``rannc`` command. Only ``capture`` and ``calibrate`` need torch."""

import sys

from pyrannc import _native


def main() -> int:
    """Run ``rannc`` with this process's arguments and return its exit status."""
    match sys.argv[1:]:
        case ["capture", *argv]:
            from pyrannc.capture import command

            return command.main(argv)
        case ["calibrate", *argv]:
            from pyrannc.calibrate import shares

            return shares.main(argv)
    return _native.run_cli(sys.argv)
