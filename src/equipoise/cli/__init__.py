"""The command `equipoise`: one file for each of its commands, and how mistakes are told."""

from equipoise.cli.entry import main

__all__ = ["main"]
