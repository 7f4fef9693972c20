"""Sequential averaging: of many fixed points, the one with the smallest value of a regulariser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from equipoise.core.validate import SettingError, require_between, require_positive
from equipoise.prox.regularizer import Regularizer, as_regularizer
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["SAM"]


@final
@SOLVERS.register("sam", needs_options=True)
@dataclass(frozen=True)
class SAM(Solver):
    """Approach the fixed point with the smallest `R` (OptEq, eq. 11).

    `z_k = beta_k S_k(z_{k-1}) + (1 - beta_k) f(z_{k-1})`,
    `S_k(z) = z - gamma (grad R(z) + lambda_k z)` with `beta_k = eta/k^rho`,
    `lambda_k = eta/k^decay` and `gamma = 1/(2 L)`, `L = lipschitz`: sequential averaging (Xu,
    2004), which has nothing to do with sharpness-aware minimisation. If `f` is nonexpansive, `R` is
    convex and smooth with one minimiser on the fixed points of `f`, the fixed points of the
    averaged steps are bounded, and `rho + 2 decay < 1`, then `z_k` converges to that minimiser
    (OptEq, Theorem 5). For other `R`, such as HSIC, it is a heuristic.

    It is slow. The iterate is off by `beta_k`, times the inverse of how fast `f` contracts towards
    its fixed points, and by `lambda_k`, which pulls towards zero. Besides it lags behind, at worst
    by `k^-(1 - rho - 2 decay)`, and much less if `R` is strongly convex. Equal exponents would be
    1/4 for each; the default of 0.3 serves the first two, which dominated in trials. A smaller
    `eta` makes the first two smaller and the lag longer.

    It makes all `max_steps` steps and returns the last iterate, because being at a fixed point is
    no reason to stop. Its residual is of the order of `beta_k gamma |grad R|`, so the status is
    `MAX_STEPS` unless the tolerance is coarse: in a layer set `on_failure="ignore"` or a
    `tolerance` of that size. `Implicit` differentiates as if the equilibrium were isolated; where
    there are many, `I - J` is singular and only `Unrolled`, which records the steps of this solver,
    gives the derivative of what is returned.

    Args:
        regularizer: `R`: a regulariser, its name, a table, or a function as `Custom` takes it. If
            it ties samples together, the cell must do so too.
        rho: How fast `beta_k`, the weight of the regulariser's step, falls.
        decay: How fast `lambda_k`, the pull towards zero, falls.
        lipschitz: A Lipschitz constant of the gradient of `R`; by default the regulariser's own.
        eta: The first `beta` and `lambda`; by default `min(sqrt(2 lipschitz), lipschitz/2, 1/2)`,
            as in the theorem. It may be smaller, and up to `min(1, 3 lipschitz)`, where no step
            expands and the theorem applies to the later steps.
    """

    runs_all_steps: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "sequential averaging is slow: loosen tolerance to a residual of this size, or set "
        "on_failure='ignore'"
    )

    regularizer: str | Mapping[str, Any] | Regularizer | Callable[[Tensor], Tensor]
    rho: float = 0.3
    decay: float = 0.3
    lipschitz: float | None = None
    eta: float | None = None
    _penalty: Regularizer = field(init=False, repr=False, compare=False)
    _smoothness: float = field(init=False, repr=False, compare=False)
    _scale: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        penalty = as_regularizer(self.regularizer)
        if isinstance(self.regularizer, Mapping):
            object.__setattr__(self, "regularizer", penalty)
        require_between("SAM.rho", self.rho, 0, 1, "()")
        require_positive("SAM.decay", self.decay)
        if not self.rho + 2 * self.decay < 1:
            raise SettingError(
                "SAM.decay",
                f"be less than (1 - rho)/2 = {(1 - self.rho) / 2:g}, so that rho + 2 decay < 1",
                self.decay,
            )
        smoothness = penalty.lipschitz if self.lipschitz is None else self.lipschitz
        if smoothness is None:
            raise SettingError(
                "SAM.lipschitz",
                f"be given for {type(penalty).__name__}, which knows no Lipschitz constant of its "
                "gradient",
                None,
                "Pass a bound of its curvature, and smooth a regulariser that has kinks.",
            )
        require_positive("SAM.lipschitz", smoothness)
        largest = min(1.0, 3 * smoothness)
        eta = min((2 * smoothness) ** 0.5, smoothness / 2, 0.5) if self.eta is None else self.eta
        require_positive("SAM.eta", eta)
        if eta > largest:
            raise SettingError(
                "SAM.eta",
                f"be at most min(1, 3 lipschitz) = {largest:g}",
                eta,
                "Some steps would expand.",
            )
        for name, value in (("_penalty", penalty), ("_smoothness", smoothness), ("_scale", eta)):
            object.__setattr__(self, name, value)

    @property
    def couples(self) -> bool:
        """Whether the regulariser ties samples together, so that the batch must be one problem."""
        return self._penalty.coupled

    @property
    def gamma(self) -> float:
        """The step along the gradient of the regulariser, `1/(2 lipschitz)`."""
        return 1 / (2 * self._smoothness)

    def schedule(self, step: int) -> tuple[float, float]:
        """Return `beta_k` and `lambda_k` of a step, counted from 1."""
        return self._scale / step**self.rho, self._scale / step**self.decay

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        if problem.affine:
            raise ValueError(
                "SAM must solve the forward equation, where it chooses among equilibria; got "
                "a linear one, such as an adjoint. "
                "Give it to the layer and leave Implicit(solver=...) to another solver."
            )
        if self._penalty.coupled and not problem.coupled:
            raise ValueError(
                "SAM.regularizer must not tie independent samples together; got "
                f"{type(self._penalty).__name__}. "
                "Set coupled = True on the cell, so that the batch is one problem."
            )
        if not isinstance(problem.unpack(z), Tensor):
            raise ValueError(
                "SAM must have a state of one tensor, which its regulariser is a function of; "
                "got a tree of tensors."
            )
        return _Average(self, problem)


class _Average(Rule):
    def __init__(self, settings: SAM, problem: Problem) -> None:
        self.settings = settings
        self.problem = problem
        self.step = 0

    def advance(self, at: Point) -> Move:
        self.step += 1
        beta, decay = self.settings.schedule(self.step)
        gamma = self.settings.gamma
        slope = self.problem.pack(
            self.settings._penalty.gradient(self.problem.unpack(at.z)), "Regularizer.gradient"
        )
        kept = torch.add((1 - beta) * at.f, at.z, alpha=beta * (1 - gamma * decay))
        return Move(torch.add(kept, slope, alpha=-beta * gamma))

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        self.problem = problem
