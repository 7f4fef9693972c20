"""Things by name: one registry per kind drives the API, its messages and the contract tests."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from equipoise.core.named_code import is_code_name, load_code, to_short_name
from equipoise.core.option import Option, field_options, keyword_options
from equipoise.core.plugin import find_plugins, load_plugin, plugin_code
from equipoise.core.validate import SettingError

__all__ = ["Registry", "choose"]

T = TypeVar("T")
C = TypeVar("C", bound=type)


@cache
def _options_of(entry: type) -> dict[str, Option]:
    return field_options(entry) if is_dataclass(entry) else keyword_options(entry)


MAX_LISTED = 800
"""Characters of a list of names beyond which a message shows the likeliest alone."""
LIKELY = 12


def choose(key: str, value: str, options: Iterable[str], rule: str = "be one of") -> str:
    """Return `value` if it is one of `options`, else raise with the list and the nearest name.

    Args:
        key: The setting.
        value: What was given.
        options: What there is to choose from.
        rule: What must be true of the value, worded to stand between "must" and the options.
    """
    names = sorted(options)
    if value in names:
        return value
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(names)
    if len(listed) > MAX_LISTED:
        likely = difflib.get_close_matches(str(value), names, n=LIKELY, cutoff=0)
        listed = f"{len(names)} names, such as {', '.join(sorted(likely))}"
    raise SettingError(key, f"{rule} {listed}", value, hint)


class Registry(Generic[T]):
    """Maps names to classes of one kind and turns "a name, a table or an object" into an object.

    A table is a name with options, as a config holds it: `{"name": "anderson", "memory": 3}`.
    Iterating leaves out the classes that were registered as needing options; `names` has them all.

    Args:
        kind: What the entries are, as it appears in messages (`solver`).
        base: The class every entry derives from.
        group: The group of entry points by which installed packages add to it; with one, code may
            be named too (`package.module:name`, `file.py:name`). Empty takes what is registered
            alone.
    """

    def __init__(self, kind: str, base: type[T], group: str = "") -> None:
        self.kind = kind
        self.base = base
        self.group = group
        self._entries: dict[str, type[T]] = {}
        self._need_options: set[str] = set()
        self._outside: dict[str, type[T]] = {}

    def register(self, name: str, *, needs_options: bool = False) -> Callable[[C], C]:
        """Class decorator that files a class under `name`.

        Args:
            name: The name.
            needs_options: Whether the name alone makes no object where others of its kind do, so
                that contracts which try every name leave it out.
        """

        def add(entry: C) -> C:
            if name in self._entries:
                raise SettingError(f"{self.kind}.name", "be new", name, "It is registered already.")
            self._entries[name] = entry
            if needs_options:
                self._need_options.add(name)
            return entry

        return add

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name not in self._need_options)

    def __getitem__(self, name: str) -> type[T]:
        return self.find(self.kind, name)

    def find(self, key: str, name: str, *, also: Iterable[str] = ()) -> type[T]:
        """Return the class of a name: one that is registered, a plug-in, or code that it names.

        Args:
            key: The setting that holds the name, for messages.
            name: The name.
            also: Further names that the caller has handled, listed in the error message.
        """
        if name in self._entries:
            return self._entries[name]
        if self.group and is_code_name(name):
            return self._adopt(key, name, load_code(key, name))
        plugins = find_plugins(self.group)
        if name not in plugins:
            choose(key, name, {*self._entries, *plugins, *also})
        return self._adopt(key, name, load_plugin(key, name, plugins[name]))

    def find_code(self, name: str) -> str:
        """Return the code behind a name, as `package.module:name`; empty for registered classes.

        Args:
            name: The name.
        """
        if name in self._entries:
            return ""
        return name if is_code_name(name) else plugin_code(self.group, name)

    def loaded(self) -> Iterator[type[T]]:
        """Return the classes that are registered, and those from outside that were asked for."""
        yield from self._entries.values()
        yield from self._outside.values()

    def _adopt(self, key: str, name: str, found: object) -> type[T]:
        """Take in a class from outside, once it is seen to be one."""
        if not isinstance(found, type) or not issubclass(found, self.base):
            kind = found.__name__ if isinstance(found, type) else type(found).__name__
            rule = f"name a class that derives from {self.base.__name__}"
            raise SettingError(key, rule, name, got=f"{name!r}, which is a {kind}")
        if inspect.isabstract(found):
            lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            rule = f"name a class that defines {lacking}"
            raise SettingError(key, rule, name)
        entry: Any = found
        if not hasattr(entry, "name"):
            entry.name = to_short_name(name)
        self._outside[name] = entry
        return entry  # type: ignore[no-any-return]

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def options(self, name: str) -> dict[str, Option]:
        """Return what is known about the options of a class.

        Args:
            name: Its name.
        """
        return dict(_options_of(self[name]))  # type: ignore[arg-type]

    def resolve(self, value: str | Mapping[str, Any] | T, *, also: Iterable[str] = ()) -> T:
        """Return `value` itself if it is an object, or an object of the class it names.

        Args:
            value: A name, a table of a name and options, or an object.
            also: Further names that the caller understands, listed in the error message.
        """
        if isinstance(value, self.base):
            return value
        if isinstance(value, str):
            return self._make(choose(self.kind, value, [*self._entries, *also]), {})
        if isinstance(value, Mapping):
            options = dict(value)
            if "name" not in options:
                remedy = f'Write {self.kind} = {{ name = "...", option = value }}.'
                raise SettingError(f"{self.kind}.name", "be given", None, remedy, got="nothing")
            name = choose(f"{self.kind}.name", options.pop("name"), self._entries)
            return self._make(name, options)
        if isinstance(value, type) and issubclass(value, self.base):
            raise SettingError(
                self.kind,
                "be a name or an object",
                value,
                f"Write {value.__name__}().",
                got=f"the class {value.__name__}",
            )
        article = "an" if self.base.__name__[0] in "AEIOU" else "a"
        raise SettingError(
            self.kind,
            f"be a name or {article} {self.base.__name__}",
            value,
            got=type(value).__name__,
        )

    def _make(self, name: str, options: Mapping[str, Any]) -> T:
        known, entry = self.options(name), self._entries[name]
        for option, value in options.items():
            key = f"{self.kind}.{option}"
            if not known:
                raise SettingError(key, f"be left out, since {name!r} has no options", value)
            choose(key, option, known, f"be an option of {name!r}, one of")
        for option, about in known.items():
            if option not in options and not about.has_default:
                remedy = f'Write {self.kind} = {{ name = "{name}", {option} = ... }}.'
                key = f"{self.kind}.{option}"
                raise SettingError(key, f"be given for {name!r}", None, remedy, got="nothing")
        try:
            return entry(**options)
        except SettingError as error:
            # What a class says of itself, said of what the user wrote: SAM.rho is solver.rho.
            path = error.key.removeprefix(f"{entry.__name__}.")
            if path.partition(".")[0] not in known:
                raise
            raise error.about(f"{self.kind}.{path}") from error
