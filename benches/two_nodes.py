"""Trains on two nodes that are network namespaces of this machine, with a shaped link between them, beside one process.

For each bandwidth a line of JSON: the plan, what was measured of the links, and the differences from one process. It
needs root, and the commands ip, tc and unshare. What follows `--` goes to equality.py.

python benches/two_nodes.py --mbits 20 2000 -- bert 4 --sizes 2 128 32 --dtype float64 --tolerance 1e-9
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_EQUALITY = Path(__file__).with_name("equality.py")
_NODES = ("rannc-node-0", "rannc-node-1")
_LINKS = ("rannc-link-0", "rannc-link-1")
_ADDRESSES = ("10.213.77.1", "10.213.77.2")
_PORT = 29713


def main() -> int:
    options = parse()
    failed = 0
    for mbits in options.mbits:
        with nodes(mbits):
            facts, status = train(options)
        print(json.dumps({"mbits": mbits} | facts), flush=True)
        failed |= status
    return failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", type=float, nargs="+", default=[100.0], help="bandwidths of the link, in Mbit/s")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one training")
    parser.add_argument("equality", nargs="+", help="arguments of equality.py")
    return parser.parse_args()


@contextmanager
def nodes(mbits: float) -> Iterator[None]:
    """Two namespaces that are there inside, with a link of this bandwidth."""
    forget_nodes()
    try:
        for name in _NODES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", _LINKS[0], "type", "veth", "peer", "name", _LINKS[1])
        for name, link, address in zip(_NODES, _LINKS, _ADDRESSES, strict=True):
            run("ip", "link", "set", link, "netns", name)
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "address", "add", f"{address}/24", "dev", link)
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "link", "set", link, "up")
            shape = ("tbf", "rate", f"{mbits}mbit", "burst", "64kb", "latency", "400ms")
            run(*inside, "tc", "qdisc", "add", "dev", link, "root", *shape)
        yield
    finally:
        forget_nodes()


def forget_nodes() -> None:
    """Those of a run that was killed as well."""
    for name in _NODES:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def train(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """What rank 0 printed, with the measured links, and the worst exit status."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        started = [start(node, options, profile) for node in range(len(_NODES))]
        try:
            printed = [process.communicate(timeout=options.timeout_s)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        status = max(abs(process.returncode) for process in started)
        lines = [line for line in printed[0].splitlines() if line.startswith("{")]
        facts: dict[str, Any] = json.loads(lines[-1]) if lines else {"failure": printed[0][-2000:]}
        if profile.exists():
            facts["levels"] = json.loads(profile.read_text())["levels"]
        return facts, status


def start(node: int, options: argparse.Namespace, profile: Path) -> subprocess.Popen[str]:
    """The ranks of a node, which has a name of its own."""
    named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', _NODES[node])
    launcher = ("-m", "torch.distributed.run", "--nnodes", str(len(_NODES)), "--node-rank", str(node))
    where = ("--nproc-per-node", str(options.ranks_per_node), "--master-addr", _ADDRESSES[0])
    training: Sequence[str] = (str(_EQUALITY), *options.equality)
    environment = {
        "GLOO_SOCKET_IFNAME": _LINKS[node],
        "RANNC_PROFILE": "always",
        "RANNC_PROFILE_CACHE": "0",
        "RANNC_SAVE_GRAPH_PROFILE": "1",
        "RANNC_GRAPH_PROFILE_FILE": str(profile),
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", _NODES[node], *named, sys.executable, *launcher, *where, "--master-port", str(_PORT),
         *training],
        env=os.environ | environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
