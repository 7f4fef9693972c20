"""`check_solver` passes an honest solver and says what is wrong with others."""

from dataclasses import dataclass

import pytest
import torch

from equipoise.core import require_fraction
from equipoise.solvers import Move, Rule, Solver
from equipoise.testing import ContractError, check_solver


class Plain(Rule):
    """`z <- f(z)`."""

    def advance(self, at):
        return Move(at.f)

    def select_rows(self, problem, rows):
        pass


@dataclass(frozen=True)
class Honest(Solver):
    """Plain iteration with a setting."""

    damping: float = 0.9

    def __post_init__(self):
        require_fraction("Honest.damping", self.damping)

    def start(self, problem, z, f):
        return Damped(self.damping)


class Damped(Plain):
    def __init__(self, damping):
        self.damping = damping

    def advance(self, at):
        return Move(at.z + self.damping * at.gap)


class LastStep(Plain):
    """Gives the length of its last step for the residual."""

    def advance(self, at):
        return Move(at.f, gap=at.f - at.z)


class Claims(Plain):
    """Says that it has arrived wherever it is."""

    def advance(self, at):
        return Move(at.f, f=at.f)


class Writes(Plain):
    def advance(self, at):
        return Move(at.z.copy_(at.f))


class Remembers(Plain):
    """Keeps memory of samples that have left."""

    last = 0.0

    def advance(self, at):
        new, self.last = at.f + 0.0 * (at.f - self.last), at.f
        return Move(new)


class Couples(Plain):
    """Takes steps of one length for the whole batch."""

    def advance(self, at):
        return Move(at.z + at.gap / (1 + at.gap.norm(dim=0).max()))


class Frozen(Plain):
    def advance(self, at):
        return Move(at.z)


class Draws(Plain):
    def advance(self, at):
        return Move(at.z + (0.5 + 0.5 * torch.rand_like(at.z)) * at.gap)


@dataclass(frozen=True)
class Of(Solver):
    """A solver that runs a rule."""

    rule: type[Rule] = Plain

    def start(self, problem, z, f):
        return self.rule()


class LinearOf(Of):
    linear = True


@dataclass(frozen=True)
class Unchecked(Honest):
    def __post_init__(self):
        pass


BROKEN = [
    (Of(Claims), "finds_known_fixed_points", r"must find the fixed point of the problem"),
    (Of(Writes), "writes_into_nothing", r"must leave its start and its context as they were"),
    (Of(Couples), "samples_are_independent", r"must solve each sample as if it were alone"),
    (Of(Frozen), "finds_known_fixed_points", r"must converge on the problem 'affine'"),
    (Of(Draws), "solves_are_repeatable", r"must do the same in every solve of the same problem"),
    (Of(Remembers), "finds_known_fixed_points", r"without an error; got RuntimeError: The size"),
    (Unchecked(), "settings_are_validated", r"damping must be validated .*; got no error for nan"),
]


def test_honest_solver_passes():
    report = check_solver(Honest())
    assert "statuses_are_true" in report.passed
    assert "symmetry_is_asked_for" in report.skipped


def test_solver_that_calls_a_cycle_converged_is_told():
    others = [name for name in check_solver("fixed_point").passed if name != "statuses_are_true"]
    # The loop's look at the whole batch takes the claim back, where samples end apart.
    with pytest.raises(ContractError, match=r"must return the best iterate .* got STALLED after"):
        check_solver(Of(Claims), skip=others)


def test_solver_that_reports_its_last_step_is_told():
    with pytest.raises(ContractError, match="report the recomputed relative residual"):
        check_solver(Of(LastStep), skip=["finds_known_fixed_points"])


@pytest.mark.parametrize(("solver", "check", "sentence"), BROKEN, ids=str)
def test_broken_solver_is_told(solver, check, sentence):
    with pytest.raises(ContractError, match=sentence) as caught:
        check_solver(solver)
    assert caught.value.check == check


def test_linear_solver_that_hides_its_recurrence_is_told():
    class Guess(Plain):
        def advance(self, at):
            return Move(at.f, gap=0.1 * at.gap)

    with pytest.raises(ContractError, match=r"tracks_residual = True|must find the answer"):
        check_solver(LinearOf(Guess))


def test_skip_names_a_check():
    with pytest.raises(ValueError, match=r"^check_solver\.skip must be one of .*got 'statuses'"):
        check_solver("fixed_point", skip=["statuses"])
