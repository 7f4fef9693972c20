"""The source of named code, by its hash: the file, and the files beside it that it imports."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from equipoise.core.named_code import CodeName

__all__ = ["hash_source"]


def hash_source(code: CodeName) -> dict[str, str]:
    """Return the SHA-256 of each file that code is made of. Nothing is run.

    These are the file itself and those that it imports from its own folder or package, and so on
    from there; of an installed package, only its own files. Their names are paths in that folder,
    or in the one around the package.

    Args:
        code: Which code.
    """
    home = code.locate()
    if home is None or not home.endswith(".py"):
        return {}
    first = Path(home)
    package = () if code.is_file else tuple(code.home.split("."))
    # The folder that holds the outermost package.
    root = first.parents[len(package) - (first.name != "__init__.py")] if package else first.parent
    installed = str(root) in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    prefix = (*package, first.stem)[:1] if installed or len(package) > 1 else ()
    found: dict[str, str] = {}
    waiting = [first]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        source = path.read_bytes()
        found[name] = hashlib.sha256(source).hexdigest()
        waiting += _imported(path, source, root, prefix)
    return dict(sorted(found.items()))


def _imported(path: Path, source: bytes, root: Path, prefix: tuple[str, ...]) -> Iterator[Path]:
    """The files below a folder that a source imports, if their names begin with a prefix."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # it is told when it is run
        return
    here = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(each.name.split(".")) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else ()
            base = (*above, *(node.module.split(".") if node.module else ()))
            names = [(*base, each.name) for each in node.names]
        for name in names:
            if name[: len(prefix)] != prefix:
                continue
            for length in range(1, len(name) + 1):
                place = root.joinpath(*name[:length])
                for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                    if file.is_file():
                        yield file
