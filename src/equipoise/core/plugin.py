"""What installed packages add by entry points; each is loaded when it is first asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from equipoise.core.validate import SettingError

__all__ = ["describe_package", "find_plugins", "load_plugin", "plugin_code"]


def find_plugins(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name, sorted; more than one of a name is a clash.

    Args:
        group: Such as `equipoise.models`; empty has none.
    """
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group) if group else ():
        found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


def load_plugin(key: str, name: str, entries: list[EntryPoint]) -> object:
    """Import what an entry point names.

    Args:
        key: The setting that holds its name, for messages.
        name: Its name.
        entries: All entry points of that name.
    """
    if len(entries) > 1:
        packages = " and ".join(sorted(describe_package(entry) for entry in entries))
        raise SettingError(
            key,
            "name one thing",
            name,
            "Name the code itself, as package.module:name.",
            got=f"{name!r}, which is in {packages}",
        )
    try:
        return entries[0].load()
    except (Exception, SystemExit) as error:  # whatever the plug-in raises, the sentence says it
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise SettingError(
            key,
            "name a plug-in that can be loaded",
            name,
            got=f"{name!r} of {describe_package(entries[0])} ({reason})",
        ) from error


def plugin_code(group: str, name: str) -> str:
    """Return the code that a plug-in is, as `package.module:name`; empty if there is none.

    Args:
        group: Its group.
        name: Its name.
    """
    entries = find_plugins(group).get(name, [])
    return f"{entries[0].module}:{entries[0].attr}" if len(entries) == 1 else ""


def describe_package(entry: EntryPoint) -> str:
    """Return the package that an entry point is in, with its version.

    Args:
        entry: The entry point.
    """
    about = entry.dist.metadata if entry.dist is not None else None
    if about is None or "Name" not in about:  # a package whose metadata are damaged
        return entry.value.partition(":")[0].partition(".")[0]
    return f"{about['Name']} {about['Version'] or ''}".rstrip()
