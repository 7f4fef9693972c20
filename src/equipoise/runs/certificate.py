"""What is proved of a whole network, and what an attack on it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equipoise.analysis import AttackSettings, NetworkBound
from equipoise.layers import Certificate, Statement

__all__ = ["AttackOutcome", "CertifiedRun", "RadiusSummary", "write_length"]


def write_length(length: float) -> str:
    """Return a length in all its digits: what is proved within it may be false of a longer one."""
    return repr(float(length)).removesuffix(".0")


def _by_length(parts: dict[float, float]) -> dict[str, float]:
    return {write_length(length): part for length, part in parts.items()}


@dataclass(frozen=True)
class RadiusSummary:
    """Certified radii of a data set, in the units of images in [0, 1] or of a table's columns.

    Attributes:
        split: Which samples.
        samples: How many.
        accuracy: Fraction that is predicted right, with exact equilibria.
        certified: Fraction that stays right whatever a move of a length does, by length.
        by_norm: The same by the 2L rule alone.
        median: The median radius.
        error: The most that a margin was lowered for inexact solves and rounding.
        unproved: How many samples have the radius 0.
    """

    split: str
    samples: int
    accuracy: float
    certified: dict[float, float]
    by_norm: dict[float, float]
    median: float
    error: float
    unproved: int


@dataclass(frozen=True)
class AttackOutcome:
    """What an attack on certified radii found.

    Attributes:
        samples: How many were attacked: those predicted right and certified, the first ones.
        settings: How hard it tried.
        broken: How many certificates it broke.
        changed: Fraction of classes that it changed, by the multiple of the certified radius.
    """

    samples: int
    settings: AttackSettings
    broken: int
    changed: dict[float, float]

    @property
    def half(self) -> float | None:
        """The smallest multiple at which half of the classes change; None above all tried."""
        return next((factor for factor, part in self.changed.items() if part >= 0.5), None)


@dataclass(frozen=True)
class CertifiedRun:
    """What is proved of a network, and what an attack found.

    Attributes:
        name: The run or the model.
        equilibria: What is proved of each equilibrium.
        bound: The Lipschitz constant of the whole network, with what is done to samples first.
        radii: Certified radii, if they were asked for.
        attack: What an attack found, if one was asked for.
        weights: What tells the weights of a run from others; None if it is not a run.
    """

    name: str
    equilibria: dict[str, Certificate]
    bound: NetworkBound
    radii: RadiusSummary | None = None
    attack: AttackOutcome | None = None
    weights: str | None = None

    def statements(self) -> dict[str, list[Statement]]:
        """Return all statements by what they are about."""
        found = {name: list(one.statements) for name, one in self.equilibria.items()}
        return found | {"network": [self._state_bound(), *self._state_radii()]}

    def _state_bound(self) -> Statement:
        claim = "the outputs are Lipschitz continuous in the samples"
        if self.bound.unknown:
            missing = "; ".join(f"{part.name}: {part.theorem}" for part in self.bound.unknown)
            return Statement(claim, theorem=f"unknown for {missing}")
        names = " x ".join(f"{part.name} {part.value:.4g}" for part in self.bound.parts)
        return Statement(claim, True, self.bound.value, theorem=f"product of its parts: {names}")

    def _state_radii(self) -> list[Statement]:
        found, radii, attack = [], self.radii, self.attack
        if radii is not None:
            where = f"of {radii.samples:,} {radii.split} samples"
            rule = "margins over how far differences of two outputs move"
            found += [
                Statement(
                    f"this fraction {where} is predicted right, and stays so within "
                    f"{write_length(length)}",
                    True,
                    fraction,
                    theorem=f"{rule}; 2L rule: {radii.by_norm[length]:.4g}",
                )
                for length, fraction in radii.certified.items()
            ]
        if attack is not None:
            how = f"{attack.settings.steps} steps from {attack.settings.restarts} starts"
            found.append(
                Statement(
                    f"an attack on {attack.samples:,} certified radii changes this many classes",
                    attack.broken == 0,
                    attack.broken,
                    theorem=f"projected gradient descent, {how}",
                )
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        radii, attack = self.radii, self.attack
        return {
            "name": self.name,
            "equilibria": {
                name: {
                    "holds": one.holds,
                    "lipschitz": one.lipschitz,
                    "factors": [factor._asdict() for factor in one.factors],
                    "remedy": one.remedy,
                }
                for name, one in self.equilibria.items()
            },
            "statements": [
                {
                    "about": about,
                    "statement": one.claim,
                    "verdict": one.verdict,
                    "number": one.number,
                    "margin": one.margin,
                    "theorem": one.theorem,
                }
                for about, some in self.statements().items()
                for one in some
            ],
            "lipschitz": self.bound.value,
            "parts": [vars(part) for part in self.bound.parts],
            "radii": None
            if radii is None
            else {
                **vars(radii),
                "certified": _by_length(radii.certified),
                "by_norm": _by_length(radii.by_norm),
            },
            "attack": None
            if attack is None
            else {
                "samples": attack.samples,
                **vars(attack.settings),
                "broken": attack.broken,
                "changed": {f"{factor:g}": part for factor, part in attack.changed.items()},
                "half": attack.half,
            },
        }
