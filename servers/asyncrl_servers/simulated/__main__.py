"""`python -m asyncrl_servers.simulated --spec FILE --fd N`: one simulated engine server, a child of the
run.
"""

from __future__ import annotations

from asyncrl.http import die_with_parent, serve
from asyncrl_servers.checks import read_spec
from asyncrl_servers.engine_app import engine_app
from asyncrl_servers.simulated.latency_engine import SimulatedEngine
from asyncrl_servers.simulated.simulated_state import SimulatedSpec


def main() -> None:
    """Serve until SIGTERM or until the parent is gone."""
    die_with_parent()
    spec, fd = read_spec(SimulatedSpec)
    serve(engine_app(SimulatedEngine(spec)), fd)


if __name__ == "__main__":
    main()
