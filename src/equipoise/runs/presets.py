"""Configs that come with the package. Nothing here imports torch, which takes seconds."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["list_presets", "read_preset"]


def list_presets() -> dict[str, str]:
    """Return the names of the presets, each with one sentence about it."""
    found = {}
    for entry in sorted(
        files("equipoise.runs").joinpath("preset").iterdir(), key=lambda entry: entry.name
    ):
        if entry.name.endswith(".toml"):
            words = entry.read_text("utf-8").partition("\n\n")[0].replace("#", " ").split()
            found[entry.name.removesuffix(".toml")] = " ".join(words).partition(". ")[0] + "."
    return found


def read_preset(name: str) -> bytes:
    """Return the TOML of a preset.

    Args:
        name: Its name.
    """
    return files("equipoise.runs").joinpath("preset", f"{name}.toml").read_bytes()
