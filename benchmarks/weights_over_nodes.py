"""How long weights take to several nodes (weight_sync.transport=stream), against bytes over the bandwidth of
a link.

Nodes are network namespaces of this machine, on one bridge, with a relay process and a shared memory of their
own; what leaves a node is held to --mbit by the kernel (tbf). A file of --megabytes goes from the trainer's
node to 1, 2, 4 and 8 others: `chain` is ours, each node pulling from the one before it; `each from the
trainer` has every node pull from the trainer's node alone, in the same run. Both begin when the controller
asks, and end when the last node has all pieces, each compared with its digest.

    python benchmarks/weights_over_nodes.py [--mbit 100] [--megabytes 32]

Needs root and a kernel that allows namespaces; else it says why there is nothing to measure, and ends well.
`trainer sent` is what has left the trainer's node meanwhile, in files. The medians are of chains, of which a
few are measured; the other way takes long and is measured once.

Last line: `ratio: X` = seconds of the chain to 8 nodes over bytes / bandwidth.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median

from report import options, reported

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from network_hosts import reason_for_none
from relay_hosts import RelayNetwork, relay_network

NUMBERS = (1, 2, 4, 8)


def pushed(relays: RelayNetwork, path: str, digest: int, num: int, *, is_chain: bool) -> tuple[float, int]:
    """Seconds until the last of `num` nodes has the file, and bytes that left the trainer's."""
    before = relays.hosts[0].sent_bytes()
    answer = relays.push(path, f"{digest:032x}", range(1, num + 1), is_chain=is_chain)
    assert len(answer["paths"]) == num, answer["errors"]
    return answer["seconds"], relays.hosts[0].sent_bytes() - before


def measure(num_bytes: int, mbit: float, seconds: float) -> None:
    """Print the table."""
    least_s = num_bytes * 8 / (mbit * 1e6)
    print(f"{num_bytes / 1e6:.0f} MB over links of {mbit:.0f} Mbit/s: bytes / bandwidth {least_s:.2f} s\n")
    print(f"{'':8}{'chain':>24}{'':>16}{'each from the trainer':>28}")
    columns = f"{'seconds':>12}{'of least':>12}{'trainer sent':>16}"
    print(f"{'nodes':8}{columns}{columns}")
    with relay_network(max(NUMBERS) + 1) as relays:
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "200ms")
        if not all(host.shape(*shape) for host in relays.hosts):
            print("not measured: this kernel has no tbf, so that links have no bandwidth to compare with")
            return
        path, digest, end = relays.write("v1", os.urandom(num_bytes)), 0, time.monotonic() + seconds
        plain = {}
        for num in NUMBERS:
            digest += 1
            plain[num] = pushed(relays, path, digest, num, is_chain=False)
        chains: dict[int, list[tuple[float, int]]] = {num: [] for num in NUMBERS}
        while time.monotonic() < end or len(chains[1]) < 3:
            for num in NUMBERS:
                digest += 1
                chains[num].append(pushed(relays, path, digest, num, is_chain=True))
    for num in NUMBERS:
        chain = median(one for one, _ in chains[num]), median(sent for _, sent in chains[num])
        cells = [
            f"{took:12.2f}{took / least_s:12.2f}{sent / num_bytes:16.2f}"
            for took, sent in (chain, plain[num])
        ]
        print(f"{num:<8}{''.join(cells)}")
    ratio = median(one for one, _ in chains[NUMBERS[-1]]) / least_s
    print(f"\n{len(chains[1])} chains of each length, medians")
    print(f"ratio: {ratio:.2f}")


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument(
        "--mbit", type=float, default=100.0, help="what a node may send (default: %(default)s)"
    )
    parser.add_argument("--megabytes", type=float, default=32.0, help="of the file (default: %(default)s)")
    arguments = parser.parse_args()
    if why := reason_for_none():
        print(f"weights_over_nodes: not measured: {why}")
        return
    with reported("weights_over_nodes", is_kept=arguments.write):
        measure(int(arguments.megabytes * 1e6), arguments.mbit, arguments.seconds)


if __name__ == "__main__":
    main()
