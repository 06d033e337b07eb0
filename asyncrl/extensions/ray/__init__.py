"""Processes on the nodes of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.base.errors import ConfigError, install_extra
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
    try:
        # Here, because ray is an optional package.
        from asyncrl.extensions.ray.ray_launcher import RayLauncher
    except ImportError as error:
        raise ConfigError(
            "launcher=ray, and the package `ray` is not installed",
            way_out=f"{install_extra('ray')}; or set launcher=local.",
        ) from error
    return RayLauncher(address)
