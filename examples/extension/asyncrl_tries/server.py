"""`python -m asyncrl_tries.server --spec FILE --fd N`: completions of one length."""

from __future__ import annotations

from asyncrl_simulated.simulated_engine import SimulatedEngine, SimulatedSpec

from asyncrl.base.http import die_with_parent
from asyncrl_servers.engine_routes import read_spec, serve_engine


class FixedSpec(SimulatedSpec):
    num_tokens: int

    def completion_length(self, seed: int) -> int:
        return self.num_tokens


def main() -> None:
    die_with_parent()
    spec, fd = read_spec(FixedSpec)
    serve_engine(SimulatedEngine(spec), fd)


if __name__ == "__main__":
    main()
