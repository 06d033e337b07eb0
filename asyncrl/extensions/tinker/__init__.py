"""A server for clients of the Tinker API: `asyncrl serve tinker`."""

from asyncrl.base.extensions import Extension

EXTENSION = Extension(
    about="A server for clients of the Tinker API, with many tenants.",
    page="docs/tinker.md",
    extra="tinker",
    jobs={"tinker": "asyncrl.extensions.tinker.tinker_config:TinkerConfig"},
    commands={"serve tinker": "asyncrl.extensions.tinker.tinker_command:serve_tinker"},
    engine_role="asyncrl.extensions.tinker.adapter_engines:engine_role",
)
