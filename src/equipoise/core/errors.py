"""The two ways a solve can complain: an error for the policy `raise`, a warning for the policy `warn`."""

from __future__ import annotations

__all__ = ["ConvergenceError", "ConvergenceWarning"]


class ConvergenceError(ArithmeticError):
    """A solve ended without reaching its tolerance and the caller asked for that to be an error."""


class ConvergenceWarning(UserWarning):
    """A solve ended without reaching its tolerance; the best finite iterate was used."""
