"""Things by name: one registry per kind drives the API, its messages and the contract tests."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from equipoise.core.validate import SettingError

__all__ = ["Registry", "choose"]

T = TypeVar("T")
C = TypeVar("C", bound=type)


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
    raise SettingError(key, f"{rule} {', '.join(names)}", value, hint)


class Registry(Generic[T]):
    """Maps names to classes of one kind and turns "a name or an object" into an object.

    Args:
        kind: What the entries are, as it appears in messages (`solver`).
        base: The class every entry derives from.
    """

    def __init__(self, kind: str, base: type[T]) -> None:
        self.kind = kind
        self.base = base
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator that files a class under `name`."""

        def add(entry: C) -> C:
            if name in self._entries:
                raise SettingError(f"{self.kind}.name", "be new", name, "It is registered already.")
            self._entries[name] = entry
            return entry

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __getitem__(self, name: str) -> type[T]:
        return self._entries[choose(self.kind, name, self._entries)]

    def resolve(self, value: str | T, *, also: Iterable[str] = ()) -> T:
        """Return `value` itself if it is an object, or a default object of the class it names.

        Args:
            value: A name or an object.
            also: Further names that the caller understands, listed in the error message.
        """
        if isinstance(value, self.base):
            return value
        if isinstance(value, str):
            return self._entries[choose(self.kind, value, [*self._entries, *also])]()
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
