"""Safetensors files on their way into a vLLM worker: mapped, hashed, cut into chunks. Knows torch; knows no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.serving import Refused
from asyncrl.sharing import byte_digest
from asyncrl.wire import joint_digest

RESEND = "export and prepare again; if it repeats, look for what else writes the staging file."


def map_file(path: str) -> dict[str, Tensor]:
    """All tensors of the file, in its order, lying in the file itself. Raises Refused if it cannot be read."""
    if not Path(path).is_file():
        raise Refused(400, f"no weights file {path}", way_out=RESEND)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise Refused(400, f"cannot read the weights file {path}: {error}", way_out=RESEND) from error


def check_counts(tensors: Mapping[str, Tensor], path: str, num_tensors: int, num_bytes: int) -> None:
    """Raise Refused if the file has not as many tensors and bytes as were announced."""
    found = (len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    if found != (num_tensors, num_bytes):
        raise Refused(
            409,
            f"{path} has {found[0]} tensors of {found[1]} bytes, announced were {num_tensors} of {num_bytes}",
            rule="a version is served only when what was loaded is what was sent",
            way_out=RESEND,
        )


def check_digest(version: int, path: str, found: str, announced: str) -> None:
    """Raise Refused if these are not the weights that were announced."""
    if found != announced:
        raise Refused(
            409,
            f"weights of version {version} in {path} have digest {found}, announced was {announced}",
            rule="a version is served only when what was loaded is what was sent",
            way_out=RESEND,
        )


def chunks_of(tensors: Mapping[str, Tensor], chunk_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, in chunks of at most `chunk_bytes`, or of one tensor where that is larger."""
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if chunk and size + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


class Staged:
    """A weights file that waits for its load. Its digest is computed in a thread, while the worker goes on generating.

    Life:       hashing -> staged, or failed: what was announced is another digest, or the file cannot be hashed. Is never hashed again.
    Waits:      nobody; whoever wants to know asks `is_hashed` again. `wait` is for a load that comes too early.
    Invariant:  `tensors` lie in the file that was mapped: replacing the file changes nothing here, as nobody writes into it.
    """

    def __init__(self, version: int, path: str, announced: str, num_tensors: int, num_bytes: int) -> None:
        """Raises Refused if the file has not the size that was announced; check() compares the digest."""
        self.version, self.path, self.announced = version, path, announced
        self.tensors = map_file(path)
        check_counts(self.tensors, path, num_tensors, num_bytes)
        self.num_bytes = num_bytes
        self.digest: str | None = None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._hash, name=f"hash weights {version}", daemon=True)
        self._thread.start()

    @property
    def is_hashed(self) -> bool:
        """Whether the digest is there, or the error."""
        return self.digest is not None or self.error is not None

    def wait(self) -> None:
        """Sleep until it is."""
        self._thread.join()

    def check(self) -> None:
        """Raise Refused if the file could not be hashed, or is not what was announced."""
        if self.error is not None:
            raise Refused(400, self.error, way_out=RESEND)
        check_digest(self.version, self.path, self.digest or "", self.announced)

    def _hash(self) -> None:
        try:
            self.digest = joint_digest(byte_digest(name, tensor) for name, tensor in self.tensors.items())
        except Exception as error:
            self.error = f"cannot hash {self.path}: {type(error).__name__}: {error}"
