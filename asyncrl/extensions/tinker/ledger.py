"""The server's durable record, in SQLite: sessions, models, training requests with their
answers, checkpoints, samplers, and the versions that sampled each token.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.base.errors import ConfigError
from asyncrl.extensions.tinker.trainer_calls import Part

T = TypeVar("T")
FORMAT = "1"
"""Changes with the tables. A ledger of another format is refused."""
ANSWER_S = 3600.0
"""An answer that was read is kept this long, for clients that ask again."""
SEQUENCE_S = 86400.0
"""A sampled sequence may be trained on for a day after its last use."""


@dataclass(frozen=True)
class ClientSession:
    """`owner`: the name of the key."""

    id: str
    owner: str
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    created_s: float = field(default_factory=time.time)
    ended: str = ""
    """Why it ended ("": it is open)."""


@dataclass(frozen=True)
class Model:
    """A training run. `version`: changes of its weights so far. `next_seq`: number of
    the request that runs next. `kept_seq`: requests up to this one are in the trainer's
    state file `state_file`; later ones are repeated after a loss ("": none).
    """

    id: str
    session_id: str
    owner: str
    rank: int
    seed: int
    parts: list[Part]
    user_metadata: dict[str, Any] | None = None
    version: int = 0
    next_seq: int = 0
    kept_seq: int = 0
    state_file: str = ""
    used_s: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Request:
    """A training request. `body`: JSON, or protobuf of forward_backward. `answer`: None
    until it has run; `form`: json, proto, or error. `masked`: positions of each datum
    that counted as 0.
    """

    model_id: str
    seq: int
    kind: str
    body: bytes
    answer: bytes | None = None
    form: str = ""
    masked: dict[str, list[int]] = field(default_factory=dict)
    accepted_s: float = field(default_factory=time.time)
    read_s: float = 0.0


@dataclass(frozen=True)
class SavedWeights:
    """`kind`: weights (with optimizer) or sampler_weights. `file`: within the run
    directory. `digest` and the numbers after it are of `sampler_file`, as engines check
    them.
    """

    model_id: str
    kind: str
    name: str
    owner: str
    rank: int
    parts: list[Part]
    version: int
    file: str
    size_bytes: int = 0
    digest: str = ""
    num_tensors: int = 0
    num_bytes: int = 0
    user_metadata: dict[str, str] | None = None
    created_s: float = field(default_factory=time.time)
    expires_s: float | None = None
    public: bool = False

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def sampler_file(self) -> str:
        """The file that engines read: A and B of each layer."""
        return f"{self.file}.sampler" if self.kind == "weights" else self.file

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.id}"


@dataclass(frozen=True)
class Sampler:
    """`weights`: a SavedWeights's values, which a newer one of the same name does not change;
    None: the base model. With `inflight`, a model's id, they are the model's newest
    inflight weights instead.
    """

    id: str
    session_id: str
    owner: str
    path: str = ""
    weights: dict[str, Any] | None = None
    inflight: str = ""

    @property
    def checkpoint(self) -> SavedWeights | None:
        return None if self.weights is None else SavedWeights(**self.weights)


@dataclass(frozen=True)
class SampleRecord:
    """A sampled sequence. `spans`: [start, end, version] of its tokens, by the weights of
    `model_id` ("": the base model).
    """

    id: str
    owner: str
    model_id: str
    spans: list[list[int]]
    used_s: float = field(default_factory=time.time)


KEYS = {
    ClientSession: ("id",),
    Model: ("id",),
    Request: ("model_id", "seq"),
    SavedWeights: ("model_id", "kind", "name"),
    Sampler: ("id",),
    SampleRecord: ("id",),
}
"""The tables and their keys. Lists and mappings are columns of JSON."""
JSON_COLUMNS = ("tags", "user_metadata", "parts", "spans", "masked", "weights")


class Ledger:
    """One thread reads and writes. Once put() returns, a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises ConfigError for another format, OSError."""
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._thread.submit(self._open, path).result()

    def _open(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        run = self._connection.execute
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run("CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT)")
        run("INSERT OR IGNORE INTO notes VALUES ('format', ?)", (FORMAT,))
        found = run("SELECT value FROM notes WHERE name = 'format'").fetchone()[0]
        if found != FORMAT:
            raise ConfigError(
                f"{path} has format {found}",
                rule=f"this version reads format {FORMAT}",
                way_out="choose another --run-dir.",
            )
        for kind, keys in KEYS.items():
            names = ", ".join(one.name for one in fields(kind))
            run(
                f"CREATE TABLE IF NOT EXISTS {kind.__name__} ({names}, PRIMARY KEY ({', '.join(keys)}))"
            )

    async def _on_thread(self, work: Any, *given: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, *given)

    async def put(self, *rows: Any) -> None:
        """Write rows, in place of those with the same keys, all or none."""
        await self._on_thread(self._put, rows)

    def put_soon(self, *rows: Any) -> None:
        """Write rows without waiting: a kill within milliseconds loses them."""
        self._thread.submit(self._put, rows)

    def _put(self, rows: Sequence[Any]) -> None:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for row in rows:
                values = {
                    name: json.dumps(value) if name in JSON_COLUMNS else value
                    for name, value in asdict(row).items()
                }
                names = ", ".join(values)
                marks = ", ".join("?" * len(values))
                # Not INSERT OR REPLACE, which would change the order of the rows.
                self._connection.execute(
                    f"INSERT INTO {type(row).__name__} ({names}) VALUES ({marks}) "
                    f"ON CONFLICT ({', '.join(KEYS[type(row)])}) DO UPDATE SET ({names}) = ({marks})",
                    [*values.values()] * 2,
                )

    async def find(self, kind: type[T], /, **known: Any) -> list[T]:
        """Return the rows with these values, in the order of their writing."""
        return list(await self._on_thread(self._find, kind, known))

    def _find(self, kind: type[Any], known: dict[str, Any]) -> list[Any]:
        wanted = " AND ".join(f"{name} = ?" for name in known) or "1"
        query = f"SELECT * FROM {kind.__name__} WHERE {wanted} ORDER BY rowid"
        found = self._connection.execute(query, [*known.values()])
        return [
            kind(
                **{
                    name: json.loads(row[name]) if name in JSON_COLUMNS else row[name]
                    for name in row.keys()  # noqa: SIM118  iterating a Row gives values
                }
            )
            for row in found
        ]

    async def first(self, kind: type[T], /, **known: Any) -> T | None:
        rows = await self.find(kind, **known)
        return rows[0] if rows else None

    async def drop(self, kind: type[Any], /, **known: Any) -> None:
        wanted = " AND ".join(f"{name} = ?" for name in known)
        command = f"DELETE FROM {kind.__name__} WHERE {wanted}"
        await self._on_thread(self._connection_run, command, [*known.values()])

    def _connection_run(self, command: str, values: Sequence[Any]) -> None:
        self._connection.execute(command, values)

    def note_read(self, model_id: str, seq: int) -> None:
        """Note that an answer was read, without waiting."""
        command = "UPDATE Request SET read_s = ? WHERE model_id = ? AND seq = ?"
        values = [time.time(), model_id, seq]
        self._thread.submit(self._connection_run, command, values)

    async def tidy(self) -> None:
        """Forget old answers that were read, bodies that no repetition needs, and old
        sequences.
        """
        now_s = time.time()
        kept = "(SELECT kept_seq FROM Model WHERE Model.id = Request.model_id)"
        for command, value in (
            (
                f"DELETE FROM Request WHERE read_s > 0 AND read_s < ? AND seq <= {kept}",
                now_s - ANSWER_S,
            ),
            (
                f"UPDATE Request SET body = x'' WHERE seq <= {kept} AND accepted_s < ?",
                now_s,
            ),
            ("DELETE FROM SampleRecord WHERE used_s < ?", now_s - SEQUENCE_S),
        ):
            await self._on_thread(self._connection_run, command, [value])

    async def aclose(self) -> None:
        await self._on_thread(self._connection.close)
        self._thread.shutdown()


changed = replace
"""Return a row with some other values."""
