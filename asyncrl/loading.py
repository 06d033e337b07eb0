"""Finds what the config names as `module:attribute`. Knows nothing of what it finds, and no room."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


def load_object(spec: str, setting: str) -> Any:
    """The object that `spec` (`module:attribute`) names; modules of the working directory are found, as with `python -m`.

    `setting` is the config key, for the messages. Raises ConfigError if the module cannot be imported or lacks the attribute.
    """
    module_name, separator, attribute = spec.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{setting}={spec} is not module:name", way_out=f"write it like {setting}=my_task:MyTask.")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(spec, setting, module_name, error) from error
        raise ConfigError(
            f"{setting}={spec}: there is no module {error.name}",
            rule=f"modules are looked for in the working directory ({here}) and among the installed packages",
            way_out="start asyncrl in the folder of the module, install it, or correct the name.",
        ) from error
    except (Exception, SystemExit) as error:  # the user's code: it may raise anything, exceptions of its own too
        raise _broken(spec, setting, module_name, error) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, vars(found), n=1)
            raise ConfigError(
                f"{setting}={spec}: {module_name} has no {name}",
                way_out=f"did you mean {close[0]}?" if close else f"define {name} in {getattr(found, '__file__', module_name)}.",
            )
        found = getattr(found, name)
    return found


def load_function(
    spec: str, setting: str, *, usage: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any] | None = None, args: str = "task.args"
) -> Callable[..., Any]:
    """The function that `spec` names, which can be called as `usage` says. Raises ConfigError as load_object and check_call do."""
    function: Callable[..., Any] = load_object(spec, setting)
    check_call(function, arguments, dict(keywords or {}), setting=setting, spec=spec, usage=usage, args=args)
    return function


def check_call(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], *, setting: str, spec: str, usage: str, args: str = "task.args"
) -> None:
    """Raise ConfigError if `function` cannot be called with these arguments; `usage` says how it will be called,
    `args` is the setting that its keyword arguments come from.
    """
    if not callable(function):
        raise ConfigError(
            f"{setting}={spec} is {function!r:.80}, which cannot be called",
            rule=f"it is called as {usage}",
            way_out="name a function or class.",
        )
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        raise ConfigError(
            f"{setting}={spec}{inspect.signature(function)} cannot be called as {usage}: {error}",
            way_out="give it these parameters" + (f", and the names of {args}, no more." if keywords else ", no more."),
        ) from error
    except ValueError:  # a builtin without a signature: only the call itself can tell
        return


def _broken(spec: str, setting: str, module_name: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"{setting}={spec}: importing {module_name} raised {type(error).__name__}: {error}",
        way_out=f"make `python -c 'import {module_name}'` work first.",
    )
