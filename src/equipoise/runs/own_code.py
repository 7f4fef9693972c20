"""The code that a config names: which it is, and whether it is what a run was trained with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core import SourceError, write_atomically
from equipoise.core.code_source import hash_source
from equipoise.core.code_trust import remember_code, require_trusted, trust_code
from equipoise.core.named_code import is_code_name, parse_code_name, to_absolute_name
from equipoise.data import DATASETS
from equipoise.engine import TASKS
from equipoise.models import find_model_code

if TYPE_CHECKING:
    from equipoise.runs.config import Config

__all__ = [
    "SOURCES",
    "CodeWarning",
    "check_trust",
    "describe_change",
    "find_changed_code",
    "hash_sources",
    "keep_sources",
    "name_code_beside",
    "remember_named_code",
    "with_absolute_paths",
]

SOURCES = "sources.json"  # the file of a run that keeps the hashes of its code

_FIND_CODE = {"model": find_model_code, "data": DATASETS.find_code, "task": TASKS.find_code}


class CodeWarning(UserWarning):
    """The code of a run has changed since it was trained."""


def check_trust(
    table: Mapping[str, Any], folder: Path | None, given: Mapping[str, str], *, trust: bool
) -> None:
    """Raise if a config names code that only the folder of a run vouches for. Nothing is run.

    Args:
        table: The config.
        folder: The folder of the run that it comes from, if it does.
        given: What the user gave, by key, which is the user's word.
        trust: Whether the user vouches for the folder.
    """
    for section in _FIND_CODE:
        settings = table.get(section)
        name = settings.get("name") if isinstance(settings, Mapping) else None
        if not isinstance(name, str) or not is_code_name(name):
            continue
        key = f"{section}.name"
        if folder is None or trust or key in given or section in given:
            trust_code(key, name)
        else:
            require_trusted(key, name, folder)


def name_code_beside(table: Mapping[str, Any], folder: Path) -> None:
    """Let names of code in a config file mean files beside it, wherever the command is given.

    Args:
        table: The config, which is changed.
        folder: The folder of the file.
    """
    for section in _FIND_CODE:
        settings = table.get(section)
        if isinstance(settings, dict) and isinstance(settings.get("name"), str):
            settings["name"] = to_absolute_name(settings["name"], folder)


def with_absolute_paths(config: Config) -> Config:
    """Return a config that means the same in every folder, since a run may be resumed from another.

    All code that it names is loaded.

    Args:
        config: The config.
    """
    root = config.data.root and os.path.abspath(os.path.expanduser(config.data.root))
    distillation = config.task.make_distillation()
    teacher = {} if distillation is None else asdict(distillation)
    if teacher:
        teacher["run"] = os.path.abspath(os.path.expanduser(teacher["run"]))
    # Making the sections loads what they name: a process that a sweep spawned was handed a config
    # that another process had made.
    return replace(
        config,
        model=replace(config.model, name=to_absolute_name(config.model.name)),
        data=replace(config.data, name=to_absolute_name(config.data.name), root=root),
        task=replace(config.task, name=to_absolute_name(config.task.name), teacher=teacher),
    )


def remember_named_code(config: Config) -> None:
    """Let runs that name the same code as a config run it from now on.

    Args:
        config: What this user trains.
    """
    for section in _FIND_CODE:
        name = getattr(config, section).name
        if is_code_name(name):
            remember_code(f"{section}.name", name)


def keep_sources(folder: Path, config: Config) -> None:
    """Write down the hashes of the code that a config names, if it names any.

    Args:
        folder: The folder of the run.
        config: Its config.
    """
    if found := hash_sources(config):
        write_atomically(folder / SOURCES, json.dumps(found, indent=1) + "\n")


def find_changed_code(folder: Path, config: Config) -> list[str]:
    """Return the files of a run's code that are not as they were when it was trained.

    Args:
        folder: The folder of the run.
        config: Its config.
    """
    path = folder / SOURCES
    if not path.exists():
        return []
    try:
        kept = json.loads(path.read_text("utf-8"))
        before = {(key, name, each) for key in kept for name, each in kept[key].items()}
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise SourceError(path, f"must be JSON with the hashes of files: {error}.") from error
    now = hash_sources(config)
    after = {(key, name, each) for key in now for name, each in now[key].items()}
    return sorted({name for _, name, _ in before ^ after})


def describe_change(files: Sequence[str]) -> str:
    """Return the beginning of a sentence that says which files have changed.

    Args:
        files: Their names.
    """
    return f"{', '.join(files)} {'has' if len(files) == 1 else 'have'} changed"


def hash_sources(config: Config) -> dict[str, dict[str, str]]:
    """Return the hash of each file of the code that a config names, by section and by its path.

    Args:
        config: The config.
    """
    names = {section: getattr(config, section).name for section in _FIND_CODE}
    code = {section: _FIND_CODE[section](name) for section, name in names.items()}
    return {
        section: hash_source(parse_code_name(f"{section}.name", name))
        for section, name in code.items()
        if name
    }
