"""Processes on the nodes of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.base.errors import needing
from asyncrl.base.extensions import Extension

if TYPE_CHECKING:
    from asyncrl.launch.processes import Launcher

EXTENSION = Extension(
    about="Processes on the nodes of a Ray cluster.",
    page="docs/clusters.md",
    extra="ray",
    launchers={"ray": "asyncrl.extensions.ray:open_ray"},
)


def open_ray(address: str) -> Launcher:
    """Connect to the cluster at `address`; '' means the cluster of RAY_ADDRESS or of this
    machine. Raises ConfigError.
    """
    # Here, because ray is an optional package.
    with needing("ray", "launcher=ray"):
        from asyncrl.extensions.ray.ray_launcher import RayLauncher
    return RayLauncher(address)
