"""The trainer end of each weight_sync.transport, by name."""

from __future__ import annotations

from asyncrl.messages.engine_api import TransportName
from asyncrl.weights.adapters import AdapterTransport
from asyncrl.weights.nccl import BroadcastTransport
from asyncrl.weights.transport import TrainerEnd, Transport

_TRANSPORTS: dict[TransportName, type[Transport]] = {
    "shm": Transport,
    "disk": Transport,
    "stream": Transport,
    "ipc": Transport,
    "lora": AdapterTransport,
    "nccl": BroadcastTransport,
}


def make_transport(name: TransportName, end: TrainerEnd) -> Transport:
    return _TRANSPORTS[name](end)
