"""Names that a package imports when they are first used, because torch takes a second to import."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, names: Collection[str], modules: Sequence[str]
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which imports modules until one exports the name.

    Args:
        package: The package's own name.
        names: What it exports.
        modules: The modules, relative to the package, each with an `__all__`. Those directly inside
            the package are names of it too.
    """

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in names:
            for module in modules:
                home = import_module(f"{package}.{module}")
                if name in home.__all__:
                    value = getattr(home, name)
                    setattr(import_module(package), name, value)
                    return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
