"""An extension of asyncrl: the engine kind `simulated`, a latency model without weights."""

from asyncrl.base.extensions import AddedEngine, Extension

EXTENSION = Extension(
    about="A simulated engine, for load tests.",
    page="docs/engines.md",
    fields={"rollout": "asyncrl_simulated.latency_model:FIELDS"},
    engines={
        "simulated": AddedEngine(
            "asyncrl_simulated.latency_model:FACTS",
            "asyncrl_simulated.simulated_maker:MAKER",
            preload="asyncrl_simulated.simulated_engine",
        )
    },
    check="asyncrl_simulated.simulated_maker:check_engine",
)
