"""Entry point of the ``rannc`` command. Only ``capture``, ``calibrate``, ``proof`` and ``zoo`` need torch."""

import sys

from pyrannc import _native

_INTERRUPTED = 130
"""As shells report a program that Ctrl-C has ended."""


def main() -> int:
    """Run ``rannc`` with this process's arguments and return its exit status."""
    try:
        return _run(sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(argv: list[str]) -> int:
    try:
        match argv:
            case ["capture", *rest]:
                from pyrannc.capture.command import main as capture

                return capture(rest)
            case ["calibrate", *rest]:
                from pyrannc.calibrate.command import main as calibrate

                return calibrate(rest)
            case ["proof", *rest]:
                from pyrannc.proof_command import main as proof

                return proof(rest)
            case ["zoo", *rest]:
                from pyrannc.zoo.command import main as zoo

                return zoo(rest)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"error: {argv[0]} needs PyTorch: pip install torch", file=sys.stderr)
        return 1
    return _native.run_cli(sys.argv)
