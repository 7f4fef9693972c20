"""Code of the user's own, by name: `package.module:name`, or `file.py:name`.

Loading it runs it. What may be loaded without asking is said in `code_trust`, and what a run keeps
of it in `code_source`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
import traceback
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from equipoise.core.validate import SettingError

__all__ = [
    "ChangedFileWarning",
    "CodeName",
    "is_code_name",
    "load_code",
    "parse_code_name",
    "to_absolute_name",
    "to_short_name",
]

_FILES: dict[str, tuple[str, ModuleType]] = {}
"""Files that were run, each with the hash of what it held then."""


class ChangedFileWarning(UserWarning):
    """A file has changed since this process ran it."""


class CodeName(NamedTuple):
    """What a name such as `package.module:name` says.

    Attributes:
        home: The module, or the path of the file.
        attribute: What it is called there.
        is_file: Whether `home` is a file.
    """

    home: str
    attribute: str
    is_file: bool

    def locate(self) -> str | None:
        """Return the file that holds the code, found without running any; None if there is none.

        A module that is not a file, such as one that is part of Python, returns its own name.
        """
        if self.is_file:
            path = os.path.realpath(os.path.expanduser(self.home))
            return path if os.path.isfile(path) else None
        top, *rest = self.home.split(".")
        spec = _find_top(top) or PathFinder.find_spec(top, [os.getcwd()])
        if spec is None:
            return None
        name = top
        for part in rest:
            name = f"{name}.{part}"
            folders = spec.submodule_search_locations
            # Not `find_spec`, which would import the packages around the module.
            inner = None if folders is None else PathFinder.find_spec(name, folders)
            if inner is None:
                return self.home  # a module that its package may still make when it is imported
            spec = inner
        return os.path.realpath(spec.origin) if spec.has_location and spec.origin else self.home


def is_code_name(name: str) -> bool:
    """Return whether a name is one of code, and not of something registered."""
    return ":" in name


def parse_code_name(key: str, name: str) -> CodeName:
    """Return what a name of code says, or raise.

    Args:
        key: The setting that holds the name, for the message.
        name: The name.
    """
    home, _, attribute = name.rpartition(":")
    is_file = home.endswith(".py")
    words = [attribute] if is_file else [*home.split("."), attribute]
    if not all(word.isidentifier() for word in words):
        raise SettingError(key, "be written as package.module:name or file.py:name", name)
    return CodeName(home, attribute, is_file)


def to_absolute_name(name: str, folder: str | Path = "") -> str:
    """Return a name that means the same in every folder: that of a file gets its whole path.

    Args:
        name: A name of code, or of something registered, which stays.
        folder: Where a relative path begins; by default in the current folder.
    """
    home, _, attribute = name.rpartition(":")
    if not home.endswith(".py"):
        return name
    return f"{os.path.abspath(os.path.join(folder, os.path.expanduser(home)))}:{attribute}"


def to_short_name(name: str) -> str:
    """Return a name to show: that of a file without its folders.

    Args:
        name: A name of code, or of something registered, which stays.
    """
    home, _, attribute = name.rpartition(":")
    return f"{os.path.basename(home)}:{attribute}" if home.endswith(".py") else name


def load_code(key: str, name: str) -> object:
    """Run the module or the file that a name says, and return what is called so there.

    Each is run once in a process, as imports are. The folder that holds the file, or the current
    folder if the module was found there, comes last on Python's path from then on, so that no file
    in it takes the place of an installed module.

    Args:
        key: The setting that holds the name, for messages.
        name: The name.
    """
    code = parse_code_name(key, name)
    module = _run_file(key, name, code.home) if code.is_file else _import(key, name, code.home)
    value = getattr(module, code.attribute, None)
    if value is None:
        near = difflib.get_close_matches(code.attribute, vars(module), n=1)
        hint = f"Did you mean '{code.home}:{near[0]}'?" if near else ""
        raise SettingError(key, f"name something in {code.home}", name, hint)
    return value


def _find_top(name: str) -> ModuleSpec | None:
    """Where a module outside of all packages is; finding it runs nothing."""
    try:
        return find_spec(name)
    except ValueError:  # the main module, and those that were made by hand
        return ModuleSpec(name, None)


def _import(key: str, name: str, home: str) -> ModuleType:
    importlib.invalidate_caches()  # the file may have been written just now
    top = home.partition(".")[0]
    if _find_top(top) is None and PathFinder.find_spec(top, [os.getcwd()]) is not None:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(home)
    except (Exception, SystemExit) as error:  # whatever the user's module raises is told
        remedy = "Install it, or run in the folder that holds it."
        raise SettingError(
            key,
            "name a module that can be imported",
            name,
            remedy if isinstance(error, ModuleNotFoundError) else "",
            got=f"{name!r} ({_reason(error)})",
        ) from error


def _run_file(key: str, name: str, home: str) -> ModuleType:
    path = Path(os.path.realpath(os.path.expanduser(home)))
    try:
        source = path.read_bytes()
    except OSError as error:
        rule = "name a file that can be read"
        raise SettingError(key, rule, name, got=f"{name!r} ({error.strerror})") from error
    digest = hashlib.sha256(source).hexdigest()
    known, module = _FILES.get(str(path), ("", ModuleType("")))
    if known:
        if known != digest:
            warnings.warn(
                f"{path.name} has changed since this process ran it, which goes on with what it "
                "held then",
                ChangedFileWarning,
                stacklevel=2,
            )
        return module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # A name of its own, so that it is no module that others import by the name of the file.
    unique = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = ModuleType(unique)
    module.__file__ = str(path)
    sys.modules[unique] = module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:  # whatever the user's file raises is told
        del sys.modules[unique]
        lines = [
            each.lineno
            for each in traceback.extract_tb(error.__traceback__)
            if each.filename == str(path)
        ]
        where = f", line {lines[-1]}" if lines else ""
        rule, got = "name a file that can be run", f"{name!r} ({_reason(error)}{where})"
        raise SettingError(key, rule, name, got=got) from error
    _FILES[str(path)] = digest, module
    return module


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
