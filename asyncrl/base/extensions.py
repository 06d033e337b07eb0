"""Extensions: the rows that each extension adds to the core, and their discovery.

An extension is a folder of asyncrl/extensions/, or a package with an entry point in the
group `asyncrl.extensions`. Either way it has an Extension, which names its parts as
`module:name`, so that reading it imports nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from threading import get_ident
from typing import Any, Generic, NamedTuple, TypeVar

from asyncrl import __version__
from asyncrl.base.errors import ConfigError, Message

T = TypeVar("T")

GROUP = "asyncrl.extensions"
"""Group of the entry points, and the package of asyncrl's own extensions."""
CHOSEN_IN = {
    "harnesses": "generator",
    "listeners": "observe",
    "task_sources": "task",
}
"""The section whose setting chooses a row by its name, by table."""
SWITCH = "ASYNCRL_EXTENSIONS"
"""Environment variable: `core` and the names of the extensions to use (unset = all)."""


@dataclass(frozen=True)
class AddedField(Generic[T]):
    """A setting that an extension adds to a section. `kind` is its type, `text` its
    description. `is_free`: a resume accepts any value.

    Example:
        ADDRESS = AddedField[str | None]("pager", str | None, "URL of the pager.", None)
        ADDRESS.of(config)

    """

    name: str
    kind: Any
    text: str
    default: T
    is_free: bool = False

    def of(self, section: object) -> T:
        """Return the value of this setting in a section."""
        value: T = getattr(section, self.name)
        return value


class HarnessKind(NamedTuple):
    """A harness. The setting of its name in section `generator` chooses it.

    `place`: its class, made with (GeneratorConfig, is_worker=); raises ConfigError.
    `metavar`, `text`, `parse`: its option of `asyncrl work`. `takes_args`: whether it
    reads generator.args. `task_source`: the only source whose tasks it plays, and whose
    rewards it brings ('' = it plays any task).
    """

    place: str
    metavar: str
    text: str
    parse: Callable[[str], object] = str
    takes_args: bool = True
    task_source: str = ""


class ExportKind(NamedTuple):
    """What `asyncrl export --NAME` writes instead of weights. `place`: a function with
    (run_dir, out, tell=) that returns the object of --json. `text`: of the option.
    """

    place: str
    text: str


class AddedEngine(NamedTuple):
    """A kind of engine servers. `facts`: place of its EngineCapabilities
    (config/engine_facts.py), which is imported with the settings. `maker`: place of its
    ServerMaker (engines/kinds.py). `preload`: module of its server, if that is forked
    from a process that has imported it.
    """

    facts: str
    maker: str
    preload: str = ""


class RewardKind(NamedTuple):
    """A form of `task.reward`: a section with one key, the name of the kind.

    `form`: place of the section, a ScoredReward (config/fields.py). `scorer`: place of a
    function with (TaskConfig, ClientsOf) that makes its AskedScorer (tasks/scorer.py),
    or None if there is no server to ask.
    """

    form: str
    scorer: str


class Extension(Message):
    """What an extension adds. A place is `module:name`.

    `about`: one sentence. `page`: file or address of its documentation. `extra`: the
    extra of its package that installs its libraries.
    `fields`: place of a sequence of AddedField, by section; '' is the top level.
    `refusals`: place of a function from the section's config to sentences that refuse it,
    by section. A sentence writes the section's own settings as .key.
    `harnesses`: harness kinds by name; each needs a field of that name in `generator`.
    `task_sources`: place of a function from TaskConfig, GeneratorConfig and `reads_all`
    (whether the run starts) to a PromptTask without a score function, or None, and its
    description. By name; each needs a field of that name in `task`.
    `launchers`: place of a function from the text behind `NAME:` in setting `launcher` to
    a Launcher; it raises ConfigError.
    `trackers`: place of a subclass of Tracker, by its name in observe.trackers.
    `listeners`: place of a RolloutListener, by name; each needs a field of that name in
    `observe`, and listens if it is not None. `asyncrl sft` refuses that setting.
    `exports`: kinds of `asyncrl export`, by the name of their option.
    `commands`: place of the function of a command, as typer takes it, by name, such as
    "page" or "serve page". Each `asyncrl` imports its module, so the function itself imports large packages.
    `engines`: kinds of engine servers by name, for `rollout.engine`.
    `check`: place of a function from RunConfig and the loaded tasks by name to lines of
    `asyncrl check`; it raises ConfigError.
    `roles`: place of a function from RunConfig to Roles (engines/kinds.py). They choose
    devices after the core's roles.
    `columns`: place of a function from RunConfig to the token columns that these roles, or
    annotations, add to each rollout.
    `engine_role`: place of a function from RunConfig and the Role of the rollout engines to
    the Role that they get.
    `annotations`: place of a function from RunConfig, EnginePool, Fleet.clients_of and
    ChatTokenizer to Annotations (engines/role_client.py), which may call these servers.
    `rewards`: kinds of rewards by name.
    `metrics`: `package:file` of a table like observe/metrics.csv.
    `cures`: places of functions from Pace (observe/pace.py) to sentences, by the share of
    the time or the title of the reward that they shorten.
    `jobs`: places of kinds of jobs besides runs: of the JobConfig of each, by the section
    that only its configs have.
    """

    about: str
    page: str = ""
    extra: str = ""
    fields: Mapping[str, str] = {}
    refusals: Mapping[str, str] = {}
    harnesses: Mapping[str, HarnessKind] = {}
    task_sources: Mapping[str, str] = {}
    launchers: Mapping[str, str] = {}
    trackers: Mapping[str, str] = {}
    listeners: Mapping[str, str] = {}
    exports: Mapping[str, ExportKind] = {}
    commands: Mapping[str, str] = {}
    engines: Mapping[str, AddedEngine] = {}
    check: str = ""
    roles: str = ""
    columns: str = ""
    engine_role: str = ""
    annotations: str = ""
    rewards: Mapping[str, RewardKind] = {}
    metrics: str = ""
    cures: Mapping[str, str] = {}
    jobs: Mapping[str, str] = {}

    def fields_of(self, section: str) -> Sequence[AddedField[Any]]:
        """Import the settings that are added to a section."""
        added: Sequence[AddedField[Any]] = ()
        if section in self.fields:
            added = load_place(self.fields[section])
        return added

    def keys(self) -> list[str]:
        """Import all settings that are added, and return their keys."""
        for reward in self.rewards.values():
            load_place(reward.form)
        added = [
            f"{section}.{added.name}".removeprefix(".")
            for section in self.fields
            for added in self.fields_of(section)
        ]
        return added + [f"task.reward.{name}" for name in self.rewards]


class Source(NamedTuple):
    """Where an extension was found: `package` and `version` are of the distribution."""

    name: str
    package: str
    version: str
    load: Callable[[], Extension]

    def __str__(self) -> str:
        return f"{self.name} {self.version} of {self.package}"


class Discovery(NamedTuple):
    """`used`: extensions by name, sorted. `broken`: why others cannot be used. `off`:
    names that SWITCH leaves out; nothing of these extensions is imported.
    """

    sources: Mapping[str, Source]
    used: Mapping[str, Extension]
    broken: dict[str, str]
    off: Sequence[str]


def load_place(place: str) -> Any:
    """Import `module:name`. Raises ConfigError."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ConfigError:  # it names a library that is missing
        raise
    except Exception as error:  # a package from elsewhere may raise anything
        raise ConfigError(
            f"{place} cannot be imported: {type(error).__name__}: {error}",
            way_out="repair its package; `asyncrl extensions` lists all extensions.",
        ) from error


def extensions() -> Mapping[str, Extension]:
    """Return the extensions in use, by name and in its order."""
    return discover().used


def rows(kind: str) -> dict[str, Any]:
    """Return the rows that all extensions add to the table `kind`, by their names."""
    return {
        name: row
        for extension in extensions().values()
        for name, row in getattr(extension, kind).items()
    }


_begun = set[int]()
"""Threads that have called discover()."""


def all_of(kind: str, *arguments: object) -> Iterator[Any]:
    """Yield what the functions yield that all extensions name in the row `kind`."""
    for extension in extensions().values():
        if place := getattr(extension, kind):
            yield from load_place(place)(*arguments)


@cache
def discover() -> Discovery:
    """Find all extensions, and import the settings of the ones in use. Raises ImportError
    if these settings import a section that extensions add to.
    """
    if get_ident() in _begun:
        raise ImportError(
            "settings of extensions are imported by sections that extensions add to"
        )
    _begun.add(get_ident())
    sources = dict[str, Source]()
    repeated = set[str]()
    for source in _sources():
        if source.name in sources:
            repeated.add(source.name)
        sources[source.name] = source
    names = {*sources}
    if text := os.environ.get(SWITCH):
        names = {name.strip() for name in text.split(",")} - {"core"}
    used = dict[str, Extension]()
    broken = dict[str, str]()
    for name in sorted(names):
        if name not in sources:
            broken[name] = f"{SWITCH}={text} names it, and it is not installed"
        elif name in repeated:
            broken[name] = "another package has an extension of this name, too"
        else:
            extension, fault = _loaded(sources[name])
            if extension is None:
                broken[name] = fault
            else:
                used[name] = extension
    return Discovery(sources, used, broken, sorted(sources.keys() - names))


def _loaded(source: Source) -> tuple[Extension | None, str]:
    """Return an extension, or None and why it cannot be used."""
    try:
        extension = source.load()
        keys = extension.keys()
        for engine in extension.engines.values():
            load_place(engine.facts)
    except Exception as error:  # as in load_place()
        cause = error.__cause__ or error
        return None, f"it cannot be imported: {type(cause).__name__}: {cause}"
    for table, section in CHOSEN_IN.items():
        for row in getattr(extension, table):
            if f"{section}.{row}" not in keys:
                return None, f"{row} of {table} has no setting {section}.{row}"
    return extension, ""


def _sources() -> Iterator[Source]:
    # asyncrl's own are found by their folders. Entry points exist only after an
    # installation, which may be older than the folders.
    own = Path(__file__).parents[1] / "extensions"
    for file in own.glob("*/__init__.py"):
        name = file.parent.name
        load = partial(load_place, f"{GROUP}.{name}:EXTENSION")
        yield Source(name, "asyncrl", __version__, load)
    for point in entry_points(group=GROUP):
        assert point.dist is not None, "it was found in a distribution"
        yield Source(point.name, point.dist.name, point.dist.version, point.load)


def switched_off_with(key: str) -> str | None:
    """Return the extension that would add this key and is switched off, if any."""
    found = discover()
    for name in found.off:
        # as in discover()
        with contextlib.suppress(Exception):
            extension = found.sources[name].load()
            keys = [*extension.keys(), *extension.jobs]
            if any(f".{key}".endswith(f".{one}") for one in keys):
                return name
    return None


def written_extensions() -> str:
    """Return the extensions in use with their versions, for the files of a run."""
    found = discover()
    return ", ".join(str(found.sources[name]) for name in found.used)


def missing_extensions(written: str) -> list[str]:
    """Return the extensions of a run that are not in use here.

    Example: without the extension pager.
        >>> missing_extensions("pager 1.0 of acme-pager")
        ['pager 1.0 of acme-pager']
    """
    names = {one.partition(" ")[0]: one for one in written.split(", ") if one}
    return [names[name] for name in names if name not in extensions()]
