"""`python -m asyncrl_servers.simulated --spec FILE --fd N`: one simulated engine server, a child of the
run.
"""

from __future__ import annotations

from pydantic import ValidationError

from asyncrl.http import child_arguments, die_with_parent, fail, serve
from asyncrl_servers.engine_app import engine_app
from asyncrl_servers.simulated.latency_engine import SimulatedEngine
from asyncrl_servers.simulated.simulated_state import SimulatedSpec


def main() -> None:
    """Read the spec and serve until SIGTERM or until the parent is gone."""
    die_with_parent()
    text, fd = child_arguments()
    try:
        spec = SimulatedSpec.model_validate_json(text)
    except ValidationError as error:
        fail(
            f"the spec of the simulated engine is wrong: {error}",
            rule="see asyncrl_servers/simulated/spec.py",
        )
    serve(engine_app(SimulatedEngine(spec)), fd)


if __name__ == "__main__":
    main()
