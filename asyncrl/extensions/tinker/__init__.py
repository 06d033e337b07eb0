"""A server of the Tinker protocol (https://tinker-docs.thinkingmachines.ai)."""

from asyncrl.base.extensions import Extension

EXTENSION = Extension(
    about="Training and sampling for clients of the tinker package.",
    page="docs/tinker.md",
    extra="tinker",
)
