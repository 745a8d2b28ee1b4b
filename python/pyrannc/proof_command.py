"""``python -m pyrannc proof``: a training script, up to its first training call, which is compared with one process."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pyrannc import distributed
from pyrannc.job import process
from pyrannc.job.launch import detect_launch
from pyrannc.proof import Verdict, listen

_EXAMPLE = """\
Examples:
  python -m pyrannc proof train.py --batch 8                   # on 2 processes of this machine
  python -m pyrannc proof --ranks 4 train.py --batch 8
  torchrun --nproc-per-node 8 -m pyrannc proof train.py        # started as the training itself is
  RANNC_PARTITION_NUM=2 python -m pyrannc proof train.py       # under a Plan with two Stages

The script runs unchanged up to the first call of its RaNNCModule that trains. This call runs under the Plan, and again
in one process on rank 0 with the rows of all ranks: what Stages give each other, outputs, buffers and all gradients are
compared. Then the job ends: with 0 if they are equal to rounding, else with 1.
"""


class _Ended(SystemExit):
    """The proof is over, and so is the script."""

    def __init__(self, *, equal: bool) -> None:
        self.status = 0 if equal else 1
        super().__init__(self.status)


def main(argv: Sequence[str]) -> int:
    """Runs ``proof`` with the arguments after that word and returns the exit status."""
    arguments = _parser().parse_args(argv)
    if not Path(arguments.script).is_file():
        print(f"error: there is no script {arguments.script}", file=sys.stderr)
        return 2
    if detect_launch().launcher == "none":
        return _start(arguments)
    return _run(arguments.script, arguments.arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyrannc proof",
        description="Compares a script's first training call with one process, and says what differs first.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        default=2,
        help="processes to start, if no launcher has [default: %(default)s]",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _start(arguments: argparse.Namespace) -> int:
    """Starts this command once for each rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command = [*launcher, "-m", "pyrannc", "proof", arguments.script, *arguments.arguments]
    # Each process of several leaves the cores to the others, as torchrun would set it with a warning.
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | dict(os.environ), check=False).returncode


def _run(script: str, arguments: Sequence[str]) -> int:
    os.environ["RANNC_VERIFY_PARTITIONING"] = "1"
    listen(_end)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except _Ended as ended:
        distributed.clear()
        return ended.status
    print(f"error: {script} came to its end without a call of a RaNNCModule that trains", file=sys.stderr)
    return 2


def _end(verdict: Verdict) -> None:
    if process.get_rank() == 0:
        print(verdict)
        print("equal to one process" if verdict.equal else "NOT equal to one process", flush=True)
    raise _Ended(equal=verdict.equal)
