"""Theorems as running checks: hypotheses and conclusions measured on a network with samples.

A paper's statement is "if H_1, ..., H_k then C". A `Check` measures each of them as an `Inequality`
on a `Case`, a network with samples; a `Verdict` says what follows: the statement holds there, fails
there, or does not apply because a hypothesis is false. Families register theirs on import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.validate import SettingError, require_whole

__all__ = [
    "Case",
    "Check",
    "Finding",
    "Inequality",
    "Outcome",
    "Subject",
    "Verdict",
    "count_of",
    "find_checks",
    "largest",
    "list_checks",
    "make_case",
    "register_check",
    "smallest",
    "verify",
]

Outcome = Literal["holds", "fails", "does not apply", "unknown"]
Relation = Literal["<=", "<", ">=", ">"]


@dataclass(frozen=True)
class Inequality:
    """`value relation bound`, a hypothesis or a conclusion, as it was measured.

    Args:
        claim: What it says, as a formula or in words.
        value: The left side.
        relation: `<=`, `<`, `>=` or `>`.
        bound: The right side.
        rounding: By how much the left side may miss the bound through rounding alone.
    """

    claim: str
    value: float
    relation: Relation
    bound: float
    rounding: float = 0.0

    def __post_init__(self) -> None:
        choose("Inequality.relation", self.relation, ("<=", "<", ">=", ">"))

    @property
    def margin(self) -> float:
        """How far the value is on the side of the bound where it should be; negative if not."""
        if self.value == self.bound:
            return 0.0  # infinities as well
        gap = self.bound - self.value
        return gap if self.relation.startswith("<") else -gap

    @property
    def relative_margin(self) -> float:
        """The margin as a fraction of the larger side."""
        size = max(abs(self.value), abs(self.bound))
        return self.margin / size if 0 < size < math.inf else self.margin

    @property
    def holds(self) -> bool | None:
        """Whether it is true; None if a side is not a number."""
        if math.isnan(self.value) or math.isnan(self.bound):
            return None
        if self.rounding:
            return self.margin >= -self.rounding
        return self.margin > 0 or (self.margin == 0 and "=" in self.relation)

    def __str__(self) -> str:
        sides = f"{self.value:.4g} {self.relation} {self.bound:.4g}"
        return f"{self.claim}: {sides}, margin {self.margin:.3g}"


@dataclass(frozen=True)
class Finding:
    """What a check measured.

    Args:
        hypotheses: What the statement assumes.
        conclusions: What it promises.
        note: What a reader should know besides, as a sentence.
    """

    hypotheses: Sequence[Inequality]
    conclusions: Sequence[Inequality]
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A network with samples, on which statements are checked.

    Args:
        network: What the checks of a subject speak of.
        x: Samples.
        y: Targets.
        label: The network in a few words.
        seed: Source of whatever else a check draws.
    """

    network: Any
    x: Tensor
    y: Tensor
    label: str
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """What checks speak of: how a network of that kind is made, and recognised in a model.

    Args:
        name: The kind in a few words with its article, such as "an implicit ReLU network".
        fresh: Makes a random case; random numbers are seeded before.
        adapt: Makes a case of a model with samples and targets, or returns None if the model is of
            another kind. It must not change the model.
    """

    name: str
    fresh: Callable[[int], Case]
    adapt: Callable[[nn.Module, Tensor, Tensor], Case | None]


@dataclass(frozen=True)
class Check:
    """One numbered statement of a paper, and how it is measured.

    Args:
        name: By which it is asked for.
        statement: The statement in one line.
        paper: Where it stands.
        number: Its number there.
        subject: What it speaks of.
        measure: Measures hypotheses and conclusions on a case.
        fresh: Makes the random case, where it is not that of the subject.
    """

    name: str
    statement: str
    paper: str
    number: str
    subject: Subject
    measure: Callable[[Case], Finding]
    fresh: Callable[[int], Case] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a check found on one case.

    Attributes:
        check: The check.
        case: The network in a few words.
        finding: What was measured.
    """

    check: Check
    case: str
    finding: Finding = field(repr=False)

    @property
    def outcome(self) -> Outcome:
        """Whether the statement holds; it "does not apply" if a hypothesis is false."""
        hypotheses = [one.holds for one in self.finding.hypotheses]
        conclusions = [one.holds for one in self.finding.conclusions]
        if False in hypotheses:
            return "does not apply"
        if None in hypotheses or not conclusions:
            return "unknown"
        if False in conclusions:
            return "fails"
        return "unknown" if None in conclusions else "holds"

    @property
    def deciding(self) -> Inequality | None:
        """What the outcome rests on: the false hypothesis, or the tightest conclusion."""
        if self.outcome == "does not apply":
            some = [one for one in self.finding.hypotheses if one.holds is False]
        else:
            some = list(self.finding.conclusions)
        undecided = [one for one in some if one.holds is None]
        return min(undecided or some, key=lambda one: one.relative_margin, default=None)


def largest(*values: float) -> float:
    """Return the largest of some measurements; NaN if one is NaN, which `max` may leave out.

    Args:
        *values: At least one.
    """
    return math.nan if any(math.isnan(one) for one in values) else max(values)


def smallest(*values: float) -> float:
    """Return the smallest of some measurements; NaN if one is NaN, which `min` may leave out.

    Args:
        *values: At least one.
    """
    return math.nan if any(math.isnan(one) for one in values) else min(values)


def count_of(count: int, thing: str) -> str:
    """Return a count in words: `1 sample`, `2 samples`.

    Args:
        count: How many.
        thing: Of what, in the singular.
    """
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


_CHECKS: dict[str, Check] = {}


def register_check(
    name: str,
    statement: str,
    *,
    paper: str,
    number: str,
    subject: Subject,
    fresh: Callable[[int], Case] | None = None,
) -> Callable[[Callable[[Case], Finding]], Callable[[Case], Finding]]:
    """Return a decorator that registers a function from a case to a finding.

    Args:
        name: By which it is asked for: the family, the kind and the number, `opteq-theorem-1`.
        statement: The statement in one line.
        paper: The paper's short name.
        number: The number, such as `Theorem 1`.
        subject: What it speaks of.
        fresh: Makes the random case, where it is not that of the subject.
    """

    def add(measure: Callable[[Case], Finding]) -> Callable[[Case], Finding]:
        if name in _CHECKS:
            raise SettingError("check.name", "be new", name, "It is registered already.")
        _CHECKS[name] = Check(name, statement, paper, number, subject, measure, fresh)
        return measure

    return add


def list_checks() -> dict[str, Check]:
    """Return all checks by name, in the order of the papers; families register on import."""
    import_module("equipoise.families")
    return dict(_CHECKS)


def find_checks(name: str = "*") -> list[Check]:
    """Return the checks of a name, or of a shell-style pattern such as `opteq-*`.

    Args:
        name: The name or the pattern.
    """
    checks = list_checks()
    if any(sign in name for sign in "*?["):
        found = [check for each, check in checks.items() if fnmatchcase(each, name)]
        if not found:
            raise SettingError("verify.name", "match a check (equipoise verify --list)", name)
        return found
    return [checks[choose("verify.name", name, checks)]]


def make_case(check: Check, seed: int = 0) -> Case:
    """Return the random case that a check makes for itself.

    Args:
        check: The check.
        seed: Source of randomness.
    """
    require_whole("verify.seed", seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (check.fresh or check.subject.fresh)(seed)


def verify(
    check: str | Check,
    network: nn.Module | Case | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    seed: int = 0,
) -> Verdict:
    """Measure a statement on a network, and say whether it holds there.

    Args:
        check: The check, or its name.
        network: A model, which needs `x` and `y`, or a case; by default a random network that the
            check makes.
        x: Samples for a model.
        y: Their targets: numbers or classes.
        seed: Source of randomness of a random network.
    """
    if isinstance(check, str):
        checks = list_checks()
        check = checks[choose("verify.name", check, checks)]
    case = network
    if isinstance(case, nn.Module):
        case = _adapt(check, case, x, y)
    if case is None:
        case = make_case(check, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        return Verdict(check, case.label, check.measure(case))


def _adapt(check: Check, model: nn.Module, x: Tensor | None, y: Tensor | None) -> Case:
    if x is None or y is None:
        raise SettingError("verify.x", "be given with a model, and its targets y", None)
    if not len(x):
        raise SettingError("verify.x", "hold at least one sample", x, got="none")
    for name, values in (("x", x), ("y", y)):
        bad = ~torch.isfinite(values.reshape(len(values), -1)).all(dim=1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise SettingError(
                f"verify.{name}",
                "be finite",
                values,
                "Leave it out.",
                got=f"NaN or infinity in sample {first}",
            )
    case = check.subject.adapt(model, x, y)
    if case is None:
        raise SettingError(
            "verify.network",
            f"be {check.subject.name} for {check.name!r}",
            model,
            got=type(model).__name__,
        )
    return case
