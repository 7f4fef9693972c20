"""Which code may be run because a folder names it: only code that the user has named before.

A config that a user passes is the user's word. The folder of a run may come from somebody else, so
what it names is run only if this user has trained with the same function of the same file on this
machine, or says so. What was trained with is kept in `$XDG_STATE_HOME/equipoise/trusted`, where the
variable is `~/.local/state` by default.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from equipoise.core.atomic_file import write_atomically
from equipoise.core.errors import SourceError
from equipoise.core.named_code import parse_code_name

__all__ = ["remember_code", "require_trusted", "trust_code"]

_TRUSTED: set[str] = set()
"""What may be run in this process."""


def trust_code(key: str, name: str) -> None:
    """Let code be run in this process, whoever names it.

    Args:
        key: The setting that holds its name, for messages.
        name: Its name.
    """
    known = _identify(key, name)
    if known is not None:
        _TRUSTED.add(known)


def remember_code(key: str, name: str) -> None:
    """Let code be run from now on, in other processes of this user too.

    Args:
        key: The setting that holds its name, for messages.
        name: Its name.
    """
    known = _identify(key, name)
    if known is None:
        return
    _TRUSTED.add(known)
    try:
        path = _record(known)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, f"{known}\n")
    except (OSError, RuntimeError):  # without a home that can be written, --trust is asked for
        return


def require_trusted(key: str, name: str, folder: Path) -> None:
    """Raise unless code may be run because a folder names it. Nothing is run.

    Args:
        key: The setting that holds its name.
        name: Its name.
        folder: The folder of the run that names it.
    """
    known = _identify(key, name)
    if known is None or known in _TRUSTED:  # what is not there cannot be run
        return
    try:
        if _record(known).is_file():
            return
    except (OSError, RuntimeError):  # no home
        pass
    home = known.rpartition(":")[0]
    where = "" if name.startswith(home) else f" in {home}"
    raise SourceError(
        folder,
        f"names code that you have not trained with on this machine, {key} = {name!r}{where}; it "
        "was not run. If you trust it, add --trust (from Python: trust=True).",
    )


def _identify(key: str, name: str) -> str | None:
    """The file and the name of the code in it, or None if there is no such file."""
    code = parse_code_name(key, name)
    home = code.locate()
    return None if home is None else f"{home}:{code.attribute}"


def _record(known: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return folder / "equipoise" / "trusted" / hashlib.sha256(known.encode()).hexdigest()
