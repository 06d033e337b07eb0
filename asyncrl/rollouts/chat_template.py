"""Chat template rendering that resumes after messages were appended.

The template's loop over the messages records its reads and its state. Templates have no clock or random
numbers (those are refused), so a message's text stays valid unless its iteration read something that new
messages change (their number, whether it is the last, the next one). Rendering resumes at the first such
iteration. The part before the loop must be unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import Environment, nodes
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

LOOP, TURN = "_message_loop", "_message_turn"
"""Names in the modified template: the loop over the messages, and its `loop` variable."""
STATEFUL = {"cycler", "joiner", "lipsum", "self"}
"""Names with hidden state, or with values that differ between renderings."""


class NotFollowed(Exception):  # noqa: N818  it never leaves the tokenizer
    """The template uses its messages in an unsupported way."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Start of iteration `index` of loop number `loop`, whose messages begin at message `start`.

    `num_chars` characters precede it; `prelude` is the part before the loop. `entered`: variables at the
    start of the loop; `kept`: namespaces at the start of the iteration.
    """

    loop: int
    start: int
    index: int
    num_chars: int
    prelude: str
    entered: Mapping[str, Any]
    kept: Mapping[str, Mapping[str, Any]]


class ResumableTemplate:
    """A resumable template. render() is thread-safe."""

    def __init__(self, environment: Environment, source: str) -> None:
        """Raises NotFollowed for unsupported templates."""
        tree = environment.parse(source)
        refused = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Filter)
        for node in tree.find_all(refused):
            if not isinstance(node, nodes.Filter) or node.name == "random":
                raise NotFollowed(type(node).__name__)
        names = {node.name for node in tree.find_all(nodes.Name)}
        if found := names & (STATEFUL | {LOOP, TURN}):
            raise NotFollowed(f"the name {min(found)}")
        loops = [loop for loop in _top_loops(tree.body) if _is_over_messages(loop)]
        for number, loop in enumerate(loops):
            _watch(loop, number)
        if not loops:
            raise NotFollowed("no loop over messages")
        own = environment.overlay()
        vars(own)["getattr"] = partial(_get_attribute, own, own.getattr)
        self._template = own.from_string(tree)

    def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any], after: Checkpoint | None
    ) -> tuple[str, int, Checkpoint | None]:
        """Return (text, number of omitted characters before it, next checkpoint).

        `after`: from a rendering of the first of these messages with the same variables. Raises the
        template's errors, and NotFollowed.
        """
        run = _Run(messages, after, self._template.environment.undefined)
        clock = self._template.globals.get("strftime_now")
        given = {**variables, "messages": _Messages(run, 0), LOOP: run.enter}
        if callable(clock):
            given["strftime_now"] = run.watched(clock)
        run.context = self._template.new_context(given)
        for piece in self._template.root_render_func(run.context):
            run.pieces.append(piece)
            run.num_chars += len(piece)
        return "".join(run.pieces), run.num_before, run.checkpoint


class _Run:
    context: Context

    def __init__(self, messages: Sequence[Any], after: Checkpoint | None, undefined: type[Undefined]) -> None:
        self.messages, self.undefined, self._after = messages, undefined, after
        self.pieces: list[str] = []
        self.num_chars = self.num_before = 0
        self.reads_end = False
        self.checkpoint: Checkpoint | None = None

    def watched(self, clock: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the clock, whose value changes between renderings."""

        def now(*args: Any) -> Any:
            self.reads_end = True
            return clock(*args)

        return now

    def enter(self, loop: int, messages: Any) -> Iterator[tuple[Any, _Turn]]:
        if not isinstance(messages, _Messages):
            raise NotFollowed("a loop over a part of the messages")
        before, self.checkpoint = self._after, None
        if before is not None and loop < before.loop:
            return self._turns(loop, messages, 0, None, "")
        self._after, self.reads_end = None, False
        prelude, entered = "".join(self.pieces), _values(self.context.vars)
        if (
            before is None
            or (before.loop, before.start, before.prelude) != (loop, messages._start, prelude)
            or not _same(entered, before.entered)
        ):
            return self._turns(loop, messages, 0, entered, prelude)
        for name, kept in before.kept.items():
            attributes = _attributes(self.context.vars[name])
            attributes.clear()
            attributes.update(kept)
        self.pieces.clear()
        self.num_before = self.num_chars = before.num_chars
        return self._turns(loop, messages, before.index, before.entered, before.prelude)

    def _turns(
        self, loop: int, messages: _Messages, index: int, entered: Mapping[str, Any] | None, prelude: str
    ) -> Iterator[tuple[Any, _Turn]]:
        """Yield iterations from `index` on; make checkpoints if `entered` is given."""
        while True:
            if entered is not None and not self.reads_end:
                kept = {
                    name: _plain_values(_attributes(value))
                    for name, value in self.context.vars.items()
                    if isinstance(value, Namespace)
                }
                place = (loop, messages._start, index, self.num_chars)
                self.checkpoint = Checkpoint(*place, prelude, entered, kept)
            if messages._start + index >= len(self.messages):
                return
            yield self.messages[messages._start + index], _Turn(self, messages._start, index)
            index += 1


class _Unknown:
    """Refuses access to attributes that a subclass does not define."""

    def __getattr__(self, name: str) -> Any:
        raise NotFollowed(name)

    def __str__(self) -> str:
        raise NotFollowed("messages as text")

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise NotFollowed("messages compared")

    __hash__ = None  # type: ignore[assignment]


class _Messages(_Unknown):
    """The chat from message `start` on, as a list."""

    def __init__(self, run: _Run, start: int) -> None:
        self._start, self._run = start, run

    def _all(self) -> list[Any]:
        self._run.reads_end = True
        return list(self._run.messages[self._start :])

    def __len__(self) -> int:
        self._run.reads_end = True
        return max(0, len(self._run.messages) - self._start)

    def __bool__(self) -> bool:
        return len(self._run.messages) > self._start or len(self) > 0

    def __iter__(self) -> Iterator[Any]:
        yield from self._run.messages[self._start :]
        self._run.reads_end = True

    def __reversed__(self) -> Iterator[Any]:
        yield from reversed(self._all())

    def __contains__(self, message: object) -> bool:
        return message in self._all()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            first = 0 if key.start is None else key.start
            if type(first) is int and first >= 0 and key.stop is None and key.step in (None, 1):
                return _Messages(self._run, self._start + first)
            return self._all()[key]
        if type(key) is int and 0 <= key < len(self._run.messages) - self._start:
            return self._run.messages[self._start + key]
        return self._all()[key]


class _Turn(_Unknown):
    """`loop` in the loop over messages: parts of jinja2.runtime.LoopContext."""

    depth, depth0 = 1, 0

    def __init__(self, run: _Run, start: int, index0: int) -> None:
        self._run, self._at, self.index0 = run, start + index0, index0

    @property
    def index(self) -> int:
        return self.index0 + 1

    @property
    def first(self) -> bool:
        return self.index0 == 0

    @property
    def last(self) -> bool:
        return not self._has_next()

    @property
    def previtem(self) -> Any:
        if self.index0 == 0:
            return self._run.undefined("there is no previous item")
        return self._run.messages[self._at - 1]

    @property
    def nextitem(self) -> Any:
        if not self._has_next():
            return self._run.undefined("there is no next item")
        return self._run.messages[self._at + 1]

    @property
    def length(self) -> int:
        return self.index0 + self.revindex

    @property
    def revindex(self) -> int:
        self._run.reads_end = True
        return len(self._run.messages) - self._at

    @property
    def revindex0(self) -> int:
        return self.revindex - 1

    def _has_next(self) -> bool:
        if self._at + 1 < len(self._run.messages):
            return True
        self._run.reads_end = True
        return False


_DICT_ATTRIBUTES = frozenset(dir(dict))


def _get_attribute(
    environment: Environment, sandboxed: Callable[[Any, str], Any], value: Any, name: str
) -> Any:
    """Return an attribute like the sandbox's getattr, ten times faster for common cases."""
    kind = type(value)
    if kind is dict:
        if name not in _DICT_ATTRIBUTES:
            return value[name] if name in value else environment.undefined(obj=value, name=name)
    elif name[:1] != "_":
        if isinstance(value, Namespace):
            if name in (attributes := _attributes(value)):
                return attributes[name]
        elif kind is _Turn or kind is LoopContext:
            return getattr(value, name) if hasattr(kind, name) else sandboxed(value, name)
    return sandboxed(value, name)


# ---- modification of the template


def _top_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    """Yield loops that run once, with all variables in the context."""
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            yield from _top_loops([*node.body, *node.elif_, *node.else_])


def _is_over_messages(loop: nodes.For) -> bool:
    """Return whether the loop runs over messages in order, by its name; checked again at run time."""
    over = loop.iter
    if isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Slice) and over.arg.step is None:
        over = over.node
    is_simple = not (loop.recursive or loop.test or loop.else_)
    return is_simple and isinstance(over, nodes.Name) and over.name.endswith("messages")


def _watch(loop: nodes.For, number: int) -> None:
    """Make it `for message, TURN in LOOP(number, messages)`."""
    lineno = loop.lineno
    renamed = _RenamedLoop()
    loop.body = [renamed.visit(node) for node in loop.body]
    function = nodes.Name(LOOP, "load", lineno=lineno)
    loop.iter = nodes.Call(function, [nodes.Const(number), loop.iter], [], None, None, lineno=lineno)
    loop.target = nodes.Tuple([loop.target, nodes.Name(TURN, "store", lineno=lineno)], "store", lineno=lineno)
    assert loop.environment is not None, "a parsed template has one"
    loop.set_environment(loop.environment)


class _RenamedLoop(NodeTransformer):
    """Renames `loop` to TURN, except in inner loops."""

    def visit_Name(self, node: nodes.Name) -> nodes.Name:  # noqa: N802
        return nodes.Name(TURN, node.ctx, lineno=node.lineno) if node.name == "loop" else node

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        for part in (node.test, *node.else_):
            if part is not None and any(name.name == "loop" for name in _names(part)):
                raise NotFollowed("loop outside of its loop")
        node.iter = self.visit(node.iter)
        return node


def _names(node: nodes.Node) -> list[nodes.Name]:
    return [node] if isinstance(node, nodes.Name) else list(node.find_all(nodes.Name))


# ---- values of variables, saved and compared


def _attributes(namespace: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current values. A macro is its code. A namespace includes its first name, because aliases
    share state.
    """
    values: dict[str, Any] = {}
    first_names: dict[int, str] = {}
    for name, value in variables.items():
        if isinstance(value, Namespace):
            first = first_names.setdefault(id(value), name)
            values[name] = (Namespace, first, _plain_values(_attributes(value)))
        elif isinstance(value, _Messages):
            values[name] = (_Messages, value._start)
        elif isinstance(value, Macro):
            values[name] = (Macro, value._func.__code__)
        else:
            values[name] = _plain(value)
    return values


def _plain_values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in attributes.items()}


def _plain(value: Any) -> Any:
    """Return the value; templates cannot change these types. Raises NotFollowed for others."""
    if isinstance(value, list | tuple):
        for item in value:
            _plain(item)
    elif isinstance(value, dict):
        for item in value.values():
            _plain(item)
    elif value is not None and not isinstance(value, str | int | float | Undefined):
        raise NotFollowed(f"a variable of type {type(value).__name__}")
    return value


def _same(one: Any, other: Any) -> bool:
    """Return deep equality, with equal types and key order: True is not 1 as text."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return _same(list(one), list(other)) and all(map(_same, one.values(), other.values()))
    if isinstance(one, float):
        return repr(one) == repr(other)  # -0.0 is not 0.0 as text
    return isinstance(one, Undefined) or bool(one == other)
