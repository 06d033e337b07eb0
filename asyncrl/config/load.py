"""Read a config: YAML plus `key=value` overrides."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import shlex
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from asyncrl import __version__
from asyncrl.base.errors import ConfigError
from asyncrl.base.extensions import (
    SWITCH,
    discover,
    extensions,
    load_place,
    missing_extensions,
    switched_off_with,
    written_extensions,
)
from asyncrl.config.engineless_config import EnginelessConfig
from asyncrl.config.extended import refuse_broken
from asyncrl.config.fields import READS, EngineWith, located
from asyncrl.config.job_config import JobConfig
from asyncrl.config.other_names import COMMANDS, KEYS, OPTIONS
from asyncrl.config.run_config import RunConfig
from asyncrl.config.task_config import TaskConfig

Config = TypeVar("Config", bound=BaseModel)
Job = TypeVar("Job", bound=JobConfig)

OF_A_UNION = re.compile(r"\[|^(constrained-)?(int|float|str|bool)$")
SPACED = re.compile(r"([\w.]+)(?:\s*[=:]\s+|\s+=?)([^\s=.][^\s=]*)")
"""A setting with spaces: a.b = 3, a.b =3, a.b= 3, a.b: 3, a.b 3."""
_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""2024-13-45 and 0x_ raise ValueError, [[[[... raises RecursionError."""


_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
"""A number of YAML 1.2, such as 1e-6, which YAML 1.1 reads as text."""
_OTHER_BASE = re.compile(r"[-+]?0[\d_]+$|.*:")
"""A number that YAML 1.1 reads in base 8 (010 is 8) or 60 (1:30 is 90)."""
_INT, _FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys in a mapping, where YAML silently keeps the last, and
    numbers that YAML silently reads in base 8 or 60.
    """

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text: str = super().construct_scalar(node)
        why = ""
        if node.tag == _INT and _OTHER_BASE.match(text):
            why = f"YAML reads {text} in base 8 or 60; write it in base 10"
        # YAML may write half a character. Neither a JSON file nor a stop text can hold it.
        if text.encode(errors="replace").decode() != text:
            why = f"{text!r:.200} is not valid Unicode; write \\U0001F600, not two \\uD83D"
        if why:
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
        return text

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        lines = dict[str, int]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            # YAML keeps the last one, so an edit of the first would silently have no
            # effect.
            if key.value in lines:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"{key.value} appears twice, in lines {lines[key.value]} and {line}",
                    key.start_mark,
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+.0123456789"))


@cache
def job_forms() -> dict[str, type[JobConfig]]:
    """Return the kinds of jobs, by the section that only a config of this kind has."""
    forms: dict[str, type[JobConfig]] = {"task": RunConfig}
    for name, extension in extensions().items():
        for section, place in extension.jobs.items():
            try:
                forms[section] = load_place(place)
            except ConfigError as error:
                discover().broken[name] = error.what
    return forms


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check the config of a run, as load_job() does."""
    return load_job(RunConfig, path, overrides)


def load_job(
    form: type[Job],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
) -> Job:
    """Read and check a YAML file of this kind with overrides. `run_dir`: of a run that
    may be resumed with it. Raises ConfigError.
    """
    config = load_any(path, overrides, form=form, run_dir=run_dir)
    if not isinstance(config, form):
        forms = job_forms()
        section = next(name for name in forms if isinstance(config, forms[name]))
        raise ConfigError(
            f"{path} has a section {section}, so it is for {config.about}",
            way_out=f"run `asyncrl {config.command} {path}`.",
        )
    return config


def load_any(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    form: type[JobConfig] = RunConfig,
    run_dir: str | Path | None = None,
) -> JobConfig:
    """Read and check a config of any kind of job; of this one if no section says the
    kind. Raises ConfigError.
    """
    # Read once: a pipe, such as /dev/stdin, has no second time.
    values = _read_yaml(path)
    form = job_forms().get(_section_of_job(values), form)
    try:
        return _checked_file(form, values, overrides, path)
    except ConfigError as error:
        written = path if run_dir is None else Path(run_dir) / "config.yaml"
        extensions = extensions_of(Path(written)) if Path(written).is_file() else ""
        if missing := " and ".join(missing_extensions(extensions)):
            error.way_out = (
                f"install {missing}: the run was started with it; or {error.way_out}"
            )
        raise


def load_written(path: Path) -> JobConfig:
    """Read the config of a run, perhaps of another version, for commands that only
    read. Settings that this version does not know or refuses get their defaults;
    settings that do not go together stay. Raises ConfigError.
    """
    values = _read_yaml(path)
    section = _section_of_job(values)
    form = job_forms()[section] if section else EnginelessConfig
    while True:
        try:
            return form.model_validate(values, context=READS)
        except ValidationError as error:
            places = [problem["loc"] for problem in error.errors()]
        if not _drop(values, places):
            return _checked_file(form, values, (), path)  # raises


def _drop(values: Any, places: Iterable[Sequence[int | str]]) -> bool:
    """Remove the innermost keys at these places. Return whether there were any."""
    has_dropped = False
    for place in places:
        holder, section, last = None, values, None
        # Pydantic also names the form of a union, which is no key.
        for part in place:
            is_entry = isinstance(section, list) and part in range(len(section))
            if is_entry or (isinstance(section, dict) and part in section):
                holder, section, last = section, section[part], part
        if isinstance(holder, dict):
            del holder[last]
            has_dropped = True
    return has_dropped


def _section_of_job(values: object) -> str:
    """Return the section that says the kind of job, or an empty text."""
    given = values if isinstance(values, Mapping) else {}
    return next((name for name in job_forms() if name in given), "")


_WRITTEN_BY = "# asyncrl "
"""Begins the config of a run directory; the version follows."""


_EXTENSIONS = "# extensions "
"""Begins the second line of that config; extensions with their versions follow."""


def extensions_of(path: Path) -> str:
    """Return the extensions of a run at its start, from its config."""
    with path.open(encoding="utf-8") as file:
        first, second = file.readline(), file.readline()
    is_of_run = first.startswith(_WRITTEN_BY) and second.startswith(_EXTENSIONS)
    return second.removeprefix(_EXTENSIONS).strip() if is_of_run else ""


def writer_of(path: Path) -> str | None:
    """Return the version of asyncrl that wrote a run's config; another file gives None."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    if first.startswith(_WRITTEN_BY):
        return first.removeprefix(_WRITTEN_BY).strip()
    # Version 0.1.0 wrote no version.
    return "0.1.0" if path.with_name("run.id").exists() else None


def refused_version(path: Path, writer: str, what: str) -> ConfigError:
    """Return the error for a file of a run that another version wrote."""
    return ConfigError(
        f"{path} was written by asyncrl {writer}, and this is {__version__}: {what}",
        rule="a run resumes with the version that wrote it, or with one that CHANGELOG.md names",
        way_out=f"resume with asyncrl {writer}. Here, `asyncrl status`, `inspect`, `report` and `export` "
        "read the run; a new run can begin with model.path set to an export.",
    )


def _checked_file(
    form: type[Config], values: object, overrides: Sequence[str], path: str | Path
) -> Config:
    writer = writer_of(Path(path))
    if writer not in (None, __version__):
        try:
            checked(form, values, (), "it")
        except ConfigError as error:
            raise refused_version(Path(path), str(writer), error.what) from error
    return checked(form, values, overrides, str(path))


def _read_yaml(path: str | Path) -> object:
    try:
        with Path(path).open(encoding="utf-8") as file:
            return yaml.load(file, _Loader)
    except (OSError, *_NO_YAML) as error:
        way_out = _way_out_of(error, Path(path))
        raise ConfigError(
            f"cannot read the config {path}: {error}", way_out=way_out
        ) from error


def _way_out_of(error: Exception, path: Path) -> str:
    """Return what to do about a file that is not YAML."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, UnicodeDecodeError):
        return "save the file as UTF-8."
    if "=" in path.name:
        return f"write the config before its settings: CONFIG {path}."
    if (path / "run.id").is_file():
        return f"resume a run with `asyncrl run {path}/config.yaml --run-dir {path}`."
    if path.is_dir():
        return f"give the path of a YAML file; weights belong into it as model.path={path}."
    if mark is None or path.suffix not in (".yaml", ".yml", ".json", ""):
        return "give the path of a YAML file; `asyncrl init quickstart` writes quickstart.yaml."
    if "twice" in str(error):
        return "remove one of the two."
    if "\\t" in str(error):
        return f"indent line {mark.line + 1} with spaces: YAML takes no tabs."
    rules = (
        "keys of a section have equal indents, and a space follows each colon; quote texts with :, # or \\ "
        "like 'this'"
    )
    return f"correct line {mark.line + 1} or the one before: {rules}."


def name_of_config(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.yaml" else path.stem


def checked(
    form: type[Config],
    values: object,
    overrides: Sequence[str] = (),
    path: str = "the config",
) -> Config:
    """Check a config mapping of this form. `overrides` are `section.key=value`, the value as YAML.
    Raises ConfigError for all errors at once.
    """
    refuse_broken()
    for number, override in enumerate(overrides):
        # The shell splits `a.b= 3` into two arguments. For the hint, the second one
        # needs the first, and the first the ones behind it.
        before = [one for one in overrides[:number][-1:] if one.endswith("=")]
        values = _with(values, override, [*before, *overrides[number : number + 3]])
    try:
        return form.model_validate(values)
    except ValidationError as error:
        # A union reports a problem for each of its forms. They have one key and become
        # one line: `..., or: ...`.
        lines = dict[str, str]()
        for problem in error.errors():
            where, message = _explain(problem, form)
            if where in lines:
                message = f"{lines[where][:-1]}, or{message}"
            lines[where] = message
        texts = [
            f"{where} {_place(where, message, overrides, path)}{message}"
            for where, message in lines.items()
        ]
        raise ConfigError(
            "\n  ".join(texts),
            way_out="correct the file or the key=value after it; `asyncrl keys KEY` describes a key, "
            "`asyncrl check CONFIG` starts no run.",
        ) from error


def run_config_yaml(config: JobConfig) -> str:
    text = yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False)
    return f"{_WRITTEN_BY}{__version__}\n{_EXTENSIONS}{written_extensions()}\n{text}"


def _with(values: object, override: str, around: Sequence[str]) -> object:
    """Return `values` with an override. `around`: also the arguments before and behind,
    for the hint.
    """
    key, separator, text = override.partition("=")
    names = key.split(".")
    way_out = (
        "write it like buffer.max_staleness=4, and quote texts that YAML does not read."
    )
    try:
        if not (separator and all(names) and key.split() == [key]):
            if override.endswith((".yaml", ".yml")):
                way_out = "name one config; settings of another belong into it."
            elif "/" in override and not separator:
                way_out = f"name the directory of a run with --run-dir {override}."
            if spaced := SPACED.search(" ".join(around)):
                way_out = f"write {spaced[1]}={spaced[2]}, without spaces."
            raise ValueError("it is not key=value")
        if set("*$") & set(text):
            way_out = "write whole paths: *, $ and ~ are not expanded."
        elif text.startswith(("{", "[")):
            way_out = (
                f"quote it, or the shell splits it at its spaces: '{key}={text} ...'."
            )
        return _set(values, names, yaml.load(text, _Loader))
    except (TypeError, *_NO_YAML) as error:
        why = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"override {override[:80]!r} is not a key of a section with a YAML value: {why[:400]}",
            way_out=way_out,
        ) from error


def _set(section: Any, names: Sequence[str], value: object) -> object:
    """Return `section` with a value set; an entry of a list by its number or name.

    Example: `task.words.size=7` with two tasks.
        >>> _set([{"python": "a:B"}, {"name": "words"}], ["words", "size"], 7)
        [{'python': 'a:B'}, {'name': 'words', 'size': 7}]
    """
    name, *inner = names
    if isinstance(section, list):
        places = {str(at): at for at in range(len(section))}
        places |= {_called(one): at for at, one in enumerate(section)}
        places.pop("", None)
        if len(section) == 1 and name not in places:
            return [_set(section[0], names, value)]
        if name not in places or not inner:
            raise ValueError(
                f"there are several; say which one, and its key: {', '.join(places)}"
            )
        at = places[name]
        return [*section[:at], _set(section[at], inner, value), *section[at + 1 :]]
    # A copy, because the caller keeps its values. A section of only comments is None in
    # YAML.
    copied = {} if section is None else {**section}
    copied[name] = _set(copied.get(name), inner, value) if inner else value
    return copied


def _called(entry: Any) -> str:
    """Return the name of a task or an evaluation in a list, as messages print it."""
    with contextlib.suppress(TypeError, AttributeError, LookupError):
        task = entry.get("task", entry)
        if task.keys() <= TaskConfig.model_fields.keys():
            return entry.get("name") or TaskConfig.model_construct(**task).called
    return ""


def _place(where: str, message: str, overrides: Sequence[str], path: str) -> str:
    """Return where the value of `where`, such as "trainer.lora='true'", is written: of
    several sections, a key that the message names.
    """
    wrong = f"{where.partition('=')[0]}."
    for override in overrides:
        key = f"{override.partition('=')[0]}."
        is_named = where == "config" and key[:-1] in message
        if is_named or key.startswith(wrong) or wrong.startswith(key):
            return "on the command line"
    return f"in {path}"


def _explain(
    problem: ErrorDetails, form: type[BaseModel] = RunConfig
) -> tuple[str, str]:
    """Return the key, with its value unless it is a section, and the fault."""
    # Pydantic also names the form of a union in the place of an error, such as [one] or
    # constrained-int. Nobody has written that key.
    parts = [str(part) for part in problem["loc"] if not OF_A_UNION.search(str(part))]
    where = ".".join(parts) or "config"
    value = problem["input"]
    kind = problem["type"]
    if kind == "extra_forbidden":
        named = ".".join(part for part in parts if not part.isdigit())
        if (
            issubclass(form, JobConfig)
            and parts[0] in RunConfig.model_fields.keys() - form.model_fields.keys()
        ):
            hint = f"; {form.about} has none"
        elif (extension := switched_off_with(named)) is not None:
            hint = f": it is of the extension {extension}, which {SWITCH} switches off."
        else:
            closest = _closest(named, form)
            hint = ", also not of an installed extension"
            hint += f"; did you mean {closest}?" if closest else "."
        return where, f" is not a known key{hint}"
    if kind == "missing":
        return where, " is missing."
    message = located(str(problem["msg"]), where)
    if kind in ("int_parsing", "float_parsing", "int_type", "float_type"):
        example = "100" if kind.startswith("int") else "0.01 or 1e-6"
        message = f"a number belongs there, like {example}, without a unit, comma or %"
    if kind in ("int_type", "float_type") and isinstance(value, list):
        message += "; `asyncrl sweep` takes several, with commas and without brackets"
    if kind in ("list_type", "tuple_type") and isinstance(value, str):
        words = [] if value == "none" else re.split(r", ?", value)
        if where.endswith("command"):
            is_of_shell = any(mark in value for mark in "|&;<>$`")
            words = ["sh", "-c", value] if is_of_shell else shlex.split(value)
        text = yaml.dump(words, Dumper=_Dumper, default_flow_style=True, width=10**6)
        message = f"a list belongs there: write {where}={text.strip()}"
    elif kind in ("model_type", "dict_type"):
        message = _section_hint(where, value, form)
    elif kind == "string_type" and where.endswith("reward"):
        message = "one function belongs there, as module:name; it may call others and add their rewards"
    elif value == "None":
        message += "; write none for no value"
    return f"{where}{'' if isinstance(value, dict) else f'={value!r}'}", f": {message}."


def _section_hint(where: str, value: object, form: type[BaseModel]) -> str:
    """Return how to write a section in place of a value."""
    if where == "config":
        return "sections belong there: `asyncrl init quickstart` writes a config to begin with"
    info = dict(_fields(form)).get(where)
    if info is None:  # an entry of names and sections, such as trainer.roles.solver
        return "a section belongs there: write {} for its defaults"
    section, forms = section_of(info), get_args(info.annotation)
    if section is None:
        return f"names and values belong there, like {where}={{name: value}}"
    if forms and type(None) not in forms:
        return f"a section belongs there, with {', '.join(section.model_fields)}"
    if value in (None, "none", False, "false"):
        way_out = (
            "write none" if type(None) in forms else "leave it out for its defaults"
        )
        return f"a section belongs there: {way_out}"
    first, *_ = section.model_fields
    written = "" if value in (True, "true") else f"{first}: {value}"
    if where == "placement":
        written += f", rollout: {value}"
    return f"a section belongs there: write {where}={{{written}}}"


def _closest(wrong: str, form: type[BaseModel] = RunConfig) -> str:
    """Return the key of another library's name, the few keys with the same last part,
    or the likeliest of similar ones; '' without any.

    >>> _closest("learningrate")
    'trainer.learning_rate or critic.learning_rate'
    """
    known = all_keys(form)
    # First another library's name, which resembles no key here; then the right key in
    # the wrong section; a spelling mistake last, since it is a guess.
    if (ours := KEYS.get(wrong.rpartition(".")[2].lower())) in known:
        return str(ours)
    if same := [key for key in known if _last_part(key) == _last_part(wrong)]:
        likely = difflib.get_close_matches(wrong, same, n=1, cutoff=0.85)
        same.sort(key=lambda key: (key not in BASIC, len(key)))
        return " or ".join(likely or same[:3])
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.85)
    # The last key of a name counts: a basic one.
    names = {_last_part(key): key for key in sorted(known, key=BASIC.__contains__)}
    near = difflib.get_close_matches(_last_part(wrong), names, n=1, cutoff=0.85)
    return "".join(close or [names[name] for name in near])


def _last_part(key: str) -> str:
    return re.sub("[-_]", "", key.rpartition(".")[2].lower())


class Key(NamedTuple):
    name: str
    type: str
    default: str
    meaning: str


def usage_hint(option: str | None, arguments: Sequence[str]) -> str:
    """Return what to write instead of an invalid command or of `option`, or an empty
    text.
    """
    if option is None:
        command, *rest = arguments or [""]
        if command == "serve" and rest:
            command = rest[0]
        if command.endswith((".yaml", ".yml")):
            return (
                f"write `asyncrl run {command}`, or `asyncrl serve gateway {command}`."
            )
        known = COMMANDS.get(command)
        if known is None:
            return ""
        # The hint for a run is a whole command, with the run that was named.
        known = known.replace("RUN", rest[0]) if rest else known
        more = "" if "--" in known else " ..."
        return f"write `asyncrl {known}{more}`; `asyncrl --help` lists the commands."
    if option in OPTIONS:
        return OPTIONS[option]
    key = option.strip("-")
    ours = key if key in all_keys() else _closest(key)
    text = " ".join(arguments).partition(option)[2].strip("= ").partition(" ")[0]
    return f"write {ours}={text or 'VALUE'} after the config." if ours else ""


def all_keys(form: type[BaseModel] = RunConfig) -> list[str]:
    return [name for name, _ in _fields(form)]


def _fields(
    model: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield prefix + name, info
        if (section := section_of(info)) is not None:
            yield from _fields(section, f"{prefix}{name}.")


BASIC = frozenset(
    "seed model.path task.dataset task.files task.python task.reward generator.python "
    "generator.command rollout.group_size rollout.num_engines rollout.engine rollout.slots "
    "rollout.max_tokens rollout.temperature rollout.timeout_s buffer.max_staleness buffer.look_ahead "
    "buffer.on_overdue trainer.num_groups trainer.num_steps trainer.world_size trainer.learning_rate "
    "trainer.micro_batch_tokens trainer.lora algorithm.loss algorithm.advantage eval.task eval.every "
    "weight_sync.transport weight_sync.interrupt placement.trainer placement.rollout checkpoint.every "
    "observe.trackers".split()
)
"""Listed by `asyncrl keys` without --all."""
REPEATED = ("eval.task.", "placement.rollout.")
"""Sections that repeat the keys of another section."""


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """Yield (section, description, keys) in config order; '' is the top level, and
    sections of other jobs than runs are last.
    """
    infos = {**RunConfig.model_fields}
    infos |= {name: form.model_fields[name] for name, form in job_forms().items()}
    tops = [_key(name, info) for name, info in infos.items() if not section_of(info)]
    yield "", "Settings outside any section.", tops
    for name, info in infos.items():
        model = section_of(info)
        if model is not None:
            inner = _fields(model, f"{name}.")
            keys = [_key(*one) for one in inner if not one[0].startswith(REPEATED)]
            yield name, " ".join((model.__doc__ or "").split()), keys


def count_keys() -> int:
    """Return the number of settings. Keys of `generator` count once, though a task has
    them too.
    """
    known = (key for *_, keys in sections() for key in keys)
    return sum(not key.name.startswith("task.generator.") for key in known)


def schema_text() -> str:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunConfig.model_json_schema(),
    }
    return json.dumps(schema, indent=1) + "\n"


def describe_keys(wanted: str | None = None, *, lists_all: bool = False) -> str:
    """Describe settings: basic, all, a section, a key, or matches of a word. Raises
    ConfigError.
    """
    known = [key for *_, keys in sections() for key in keys]
    if wanted is None:
        found = [key for key in known if lists_all or key.name in BASIC]
        more = f"{len(BASIC)} of {len(known)} settings; more: asyncrl keys SECTION, asyncrl keys --all"
        return _described(found) if lists_all else f"{_described(found)}\n\n{more}"
    word = wanted.lower()
    found = [key for key in known if f"{key.name}.".startswith(f"{wanted}.")]
    if "." not in word:
        found = found or [
            key for key in known if word in f"{key.name} {key.meaning}".lower()
        ]
    if not found:
        closest = _closest(wanted)
        hint = f"; did you mean {closest}?" if closest else ""
        raise ConfigError(
            f"no setting, section or meaning has {wanted}{hint}",
            way_out="give a key like buffer.max_staleness, a section like buffer, a word, or --all.",
        )
    return _described(found)


def _described(keys: Sequence[Key]) -> str:
    lines = list[str]()
    for key in keys:
        default = f", default {key.default}" if key.default else ""
        lines += [f"{key.name} ({key.type}{default})", f"    {key.meaning}"]
    return "\n".join(lines)


def _key(name: str, info: FieldInfo) -> Key:
    default = "must be given" if info.is_required() else value_text(info.get_default())
    kind = _type_text(info.annotation)
    for each in info.metadata:
        if isinstance(each, EngineWith):
            kind = " | ".join(each.kinds())
    return Key(
        name,
        kind,
        default,
        " ".join((info.description or "").split()),
    )


def value_text(value: object) -> str:
    if isinstance(value, BaseModel):
        return ""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _type_text(kind: object) -> str:
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "none",
    }
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in names:
        return names[kind]
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is list:
        return f"list of {_type_text(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} numbers"
    if origin is dict:
        return "mapping"
    if hasattr(kind, "__metadata__"):
        return _type_text(arguments[0])
    return " | ".join(map(_type_text, arguments)) or "section"


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    return next(_models_in(info.annotation), None)


def _models_in(kind: object) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    if get_origin(kind) is dict:  # the names of its sections are the user's
        return
    for inner in get_args(kind):
        yield from _models_in(inner)
