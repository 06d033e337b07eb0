"""Ray's autoscaler on hosts of a network: what it calls a cloud are the hosts that no Ray runs on yet."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from network_hosts import Host
from ray.autoscaler.node_provider import NodeProvider
from ray_cluster import PORT, start_ray

KIND, TYPE, STATUS = "ray-node-type", "ray-user-node-type", "ray-node-status"
HEAD, WORKER = "head", "worker"


class HostProvider(NodeProvider):
    """The nodes of a cluster, by their addresses. Ray's monitor, on the head's host, makes and asks it."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        given = [(name, address, Path(folder)) for name, address, folder in provider_config["hosts"]]
        self._hosts = [Host(*each) for each in given]
        self._head, *self._free = self._hosts
        self._nodes: dict[str, tuple[dict[str, str], subprocess.Popen[bytes] | None]] = {
            self._head.address: ({KIND: "head", TYPE: HEAD, STATUS: "up-to-date"}, None)
        }

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        return [
            node
            for node, (tags, process) in self._nodes.items()
            if (process is None or process.poll() is None) and tag_filters.items() <= tags.items()
        ]

    def is_running(self, node_id: str) -> bool:
        return node_id in self.non_terminated_nodes({})

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._nodes[node_id][0]

    def set_node_tags(self, node_id: str, tags: Mapping[str, str]) -> None:
        self._nodes[node_id][0].update(tags)

    def internal_ip(self, node_id: str) -> str:
        return node_id

    external_ip = internal_ip

    def create_node(self, node_config: Mapping[str, Any], tags: Mapping[str, str], count: int) -> None:
        for host in self._free[:count]:
            self._free.remove(host)
            hide = [Path(path) for path in self.provider_config["hidden"].get(host.address, [])]
            process = start_ray(
                host, f"--address={self._head.address}:{PORT}", *node_config["options"], hide=hide
            )
            self._nodes[host.address] = ({**tags, STATUS: "up-to-date"}, process)

    def terminate_node(self, node_id: str) -> None:
        _, process = self._nodes.pop(node_id)
        assert process is not None, "the head is never ended"
        host = next(host for host in self._hosts if host.address == node_id)
        host.kill()
        process.wait()
        self._free.append(host)


def autoscaling(
    hosts: Sequence[Host],
    options: Sequence[str],
    resources: Mapping[str, float],
    hidden: Mapping[str, list[str]],
) -> str:
    """What `ray start --autoscaling-config` reads on the first host: the others are started when they are
    needed, with these options, and ended when they are idle. `hidden`: of hosts, by address, folders that are
    empty there.
    """
    sorts = {
        HEAD: {"resources": {}, "node_config": {}, "max_workers": 0},
        WORKER: {"resources": dict(resources), "node_config": {"options": list(options)}, "max_workers": 9},
    }
    provider = {
        "type": "external",
        "module": f"{__name__}.HostProvider",
        "hosts": [[host.name, host.address, str(host.folder)] for host in hosts],
        "hidden": dict(hidden),
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "foreground_node_launch": True,
        "worker_liveness_check": False,
    }
    empty = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    return yaml.safe_dump(
        {
            "cluster_name": "hosts",
            "max_workers": len(hosts) - 1,
            "upscaling_speed": 1.0,
            "docker": {},
            "idle_timeout_minutes": 0.05,
            "provider": provider,
            "auth": {},
            "available_node_types": sorts,
            "head_node_type": HEAD,
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            **{name: [] for name in empty},
        }
    )
