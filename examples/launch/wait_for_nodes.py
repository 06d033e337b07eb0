"""Wait until a Ray cluster has so many nodes: a run takes those that are there when it
starts.

python examples/launch/wait_for_nodes.py HOST:PORT NUM_NODES [SECONDS]

On a node of the cluster. Exit code 1, with the nodes that came, after SECONDS (600).
"""

from __future__ import annotations

import sys
import time

import ray


def main(address: str, num_nodes: int, limit_s: float = 600.0) -> str | None:
    """None, or what is missing."""
    end_s = time.monotonic() + limit_s
    ray.init(address=address, log_to_driver=False)
    while True:
        names = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])
        if len(names) >= num_nodes:
            print(
                f"Ray at {address} has {len(names)} nodes: {', '.join(names)}",
                flush=True,
            )
            return None
        if time.monotonic() > end_s:
            few = f"{len(names)} of {num_nodes} nodes after {limit_s:g} s"
            return f"Ray at {address} has {few}: {', '.join(names)}"
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])))
