"""How a contract is checked: promises one after the other, a sentence for the first broken one."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.core.errors import ConvergenceWarning
from equipoise.core.registry import choose
from equipoise.testing.trees import leaves

__all__ = [
    "ContractError",
    "Report",
    "distance",
    "pickled",
    "require",
    "require_close",
    "require_copies",
    "require_settings",
    "run_checks",
]

Case = TypeVar("Case")
Check = Callable[[Case], str | None]
"""Raises where the promise is broken; returns why it does not apply, or nothing."""


class ContractError(AssertionError):
    """A broken promise: "SUBJECT must RULE; got FOUND. REMEDY".

    Args:
        subject: What was checked, such as `MyCell.step`.
        rule: What it promises, as the sentence goes on after "must".
        found: What was found, with where and by how much.
        remedy: What to do about it, as a sentence.

    Attributes:
        check: The name of the check, as `skip` takes it.
    """

    def __init__(self, subject: str, rule: str, found: str, remedy: str = "") -> None:
        super().__init__(f"{subject} must {rule}; got {found}.{remedy and ' ' + remedy}")
        self.subject = subject
        self.rule = rule
        self.found = found
        self.remedy = remedy
        self.check = ""


@dataclass(frozen=True)
class Report:
    """What was checked.

    Attributes:
        subject: What kept its promises.
        passed: The names of the checks that ran.
        skipped: Those that did not, with the reason.
    """

    subject: str
    passed: tuple[str, ...]
    skipped: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.subject} keeps its promises: {', '.join(self.passed)}."]
        lines += [f"  {name} does not apply: {reason}." for name, reason in self.skipped.items()]
        return "\n".join(lines)


def run_checks(
    owner: str,
    subject: str,
    case: Case,
    checks: Sequence[Check[Case]],
    *,
    skip: Iterable[str] = (),
    seed: int = 0,
    inapplicable: Mapping[str, str] | None = None,
) -> Report:
    """Run checks one after the other, each from the same seed, and leave torch's generator alone.

    Args:
        owner: The function that checks, for messages.
        subject: What is checked.
        case: What the checks are given.
        checks: The checks; their names are those of the functions.
        skip: Names of checks to leave out.
        seed: Seed of everything that is drawn.
        inapplicable: Checks that do not apply, with the reason.
    """
    named = {check.__name__.lstrip("_"): check for check in checks}
    left_out = {choose(f"{owner}.skip", name, named) for name in skip}
    passed: list[str] = []
    skipped = dict(inapplicable or {})
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        # How solves end is checked where it matters; training may cut one off.
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, check in named.items():
            if name in left_out:
                skipped[name] = "it was left out"
            if name in skipped:
                continue
            torch.manual_seed(seed)
            try:
                reason = check(case)
            except ContractError as error:
                error.check = name
                raise
            except Exception as error:  # the user's code may raise anything
                told = ContractError(
                    subject,
                    f"pass the check {name!r} without an error",
                    f"{type(error).__name__}: {error}".rstrip("."),
                )
                told.check = name
                raise told from error
            if reason is None:
                passed.append(name)
            else:
                skipped[name] = reason
    return Report(subject, tuple(passed), skipped)


def require(holds: object, subject: str, rule: str, found: str, remedy: str = "") -> None:
    """Raise `ContractError` unless `holds`, a truth value or a tensor of them."""
    if not (bool(holds.all()) if isinstance(holds, Tensor) else bool(holds)):
        raise ContractError(subject, rule, found, remedy)


def distance(found: Any, expected: Any) -> float:
    """Return the largest difference of two trees, in units of the largest entry or of 1.

    Infinite if the shapes differ, or if one is NaN or infinite where the other is not.
    """
    worst = 0.0
    pairs = leaves(found), leaves(expected)
    if len(pairs[0]) != len(pairs[1]):
        return math.inf
    for one, other in zip(*pairs, strict=True):
        a, b = (
            t.to(torch.complex128 if t.is_complex() else torch.float64).detach()
            for t in (one, other)
        )
        if a.shape != b.shape:
            return math.inf
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        unit = b[b.isfinite()].abs()
        if gap.numel():
            scale = max(1.0, float(unit.max()) if unit.numel() else 1.0)
            worst = max(worst, float(gap.max()) / scale)
    return worst


def require_close(
    found: Any, expected: Any, tolerance: float, subject: str, rule: str, remedy: str = ""
) -> None:
    """Raise `ContractError` unless two trees agree within a relative tolerance."""
    gap = distance(found, expected)
    require(
        gap <= tolerance,
        subject,
        rule,
        f"a largest relative difference of {gap:.1e}, more than {tolerance:.0e}",
        remedy,
    )


def pickled(thing: Any, subject: str) -> Any:
    """Return a copy made by pickle, or a sentence if a function without a name forbids it."""
    try:
        return pickle.loads(pickle.dumps(thing))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        if "Serialization of parametrized modules" in str(error):
            return "it has parametrized weights, which torch saves by state dict only"
        if "<locals>" in str(error) or "<lambda>" in str(error):
            return "it is defined inside a function or holds a lambda, which pickle cannot find"
        raise ContractError(
            subject,
            "be picklable, so that it can be sent to workers and saved",
            f"{type(error).__name__}: {error}".rstrip("."),
            "Keep locks, files and generators out of its attributes.",
        ) from error


def require_copies(thing: Any, subject: str) -> str | None:
    """Require that a settings object equals its deep copy and its pickle."""
    copies = [copy.deepcopy(thing)]
    other = pickled(thing, subject)
    if not isinstance(other, str):
        copies.append(other)
    comparable = dataclasses.is_dataclass(thing) and "__eq__" in vars(type(thing))
    for one in copies:
        require(
            type(one) is type(thing) and (one == thing or not comparable),
            subject,
            "equal its own copy",
            f"{one!r} for {thing!r}",
            "Decorate its class with @dataclass(frozen=True) and leave __eq__ to that.",
        )
    return other if isinstance(other, str) else None


def require_settings(thing: Any, subject: str) -> str | None:
    """Require that numbers among the settings refuse NaN, and counts refuse fractions."""
    tried = 0
    for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        value = getattr(thing, field.name)
        if not field.init or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for bad in (math.nan, value + 0.5) if isinstance(value, int) else (math.nan,):
            tried += 1
            try:
                dataclasses.replace(thing, **{field.name: bad})
            except (ValueError, TypeError):
                continue
            raise ContractError(
                f"{subject}.{field.name}",
                "be validated when the object is made",
                f"no error for {bad}",
                "Call a require_* function of equipoise.core in __post_init__.",
            )
    return None if tried else "it has no settings that are numbers"
