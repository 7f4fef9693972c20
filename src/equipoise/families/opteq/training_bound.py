"""What the theorem on training says of a concrete network (OptEq v1, section G; v3, Theorem 6).

Gradient descent on `|y - y_0|^2/2`, `y = W_(L+1) z^K`, `z^(k+1) = f_L o ... o f_1(z^k)`, is to
lower the loss by `1 - eta Q_0` in each step if `eta < min(1/Q_0, 1/Q_1)`. The constants are very
pessimistic, and two steps of the proof are not true in general: Lemma 16, on which `Q_0` rests,
and `Q_1`, which leaves out the curvature in `W_(L+1)` (see the errata). So each inequality stands
beside what is measured on the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Inequality
from equipoise.core.validate import SettingError, require_positive
from equipoise.families.opteq.layer import OptEq
from equipoise.families.opteq.training_lemmas import find_constants, measure_lemmas
from equipoise.families.opteq.unrolled_network import UnrolledNetwork

__all__ = ["TrainingBound", "training_bound"]

MAX_HALVINGS = 10


@dataclass(frozen=True, repr=False)
class TrainingBound:
    """The theorem's assumptions, constants and rate, beside measured ones.

    Attributes:
        assumptions: What the theorem assumes.
        lemmas: The inequalities of its proof, at this network; claims begin with their source.
        constants: `B*`, `C_z`, ..., `Q_0` to `Q_2`; `Q_3` is another name of `Q_2`.
        step: `min(1/Q_0, 1/Q_1)`.
        rate: `1 - step Q_0`: the factor of the loss in one step that the theorem promises.
        measured_rate: The factor in one step of gradient descent with `step`, the mean of ten.
        best_step: The inverse of the largest curvature, halved until ten steps lower the loss.
        best_rate: The factor with that step.
        kernel: The smallest and largest eigenvalue of `J J^T`, `J = dy/d(parameters)`. What Lemma
            16 wants to bound is true with the smallest one: `|grad|^2 >= lambda_min |y - y_0|^2`.
    """

    assumptions: tuple[Inequality, ...]
    lemmas: tuple[Inequality, ...]
    constants: dict[str, float]
    step: float
    rate: float
    measured_rate: float
    best_step: float
    best_rate: float
    kernel: tuple[float, float]

    @property
    def applies(self) -> bool:
        """Whether all assumptions hold."""
        return all(each.holds for each in self.assumptions)

    def __repr__(self) -> str:
        numbers = "  ".join(f"{name} {value:.3g}" for name, value in self.constants.items())
        lines = ["Assumptions", *map(_line, self.assumptions)]
        lines += ["Inequalities of the proof", *map(_line, self.lemmas)]
        lines += [
            "Constants",
            f"  {numbers}",
            "Rate of the loss",
            f"  promised for steps below {self.step:.3g}: {_percent(self.rate)}"
            + ("" if self.applies else ", if all assumptions held"),
            f"  measured with the step {self.step:.3g}: {_percent(self.measured_rate)}",
            f"  measured with the step {self.best_step:.3g}, which follows from the curvature: "
            f"{_percent(self.best_rate)}",
            f"  eigenvalues of J J^T: {self.kernel[0]:.3g} to {self.kernel[1]:.3g}",
        ]
        return "\n".join(lines)


def _line(one: Inequality) -> str:
    verdict = "holds" if one.holds else "FAILS"
    return f"  {verdict}  {one.claim}: {one.value:.3g} {one.relation} {one.bound:.3g}"


def _percent(rate: float) -> str:
    """What a factor of the loss means for one step."""
    return f"{'falls' if rate <= 1 else 'grows'} by {abs(100 * (1 - rate)):.3g} % a step"


def training_bound(
    layer: OptEq,
    head: nn.Linear,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 20,
    extractor_lipschitz: float = 1.0,
) -> TrainingBound:
    """Return what the theorem says of a deep OptEq with a linear head, on some samples.

    The bounds of Assumption 5 are the smallest that the weights allow; `B*` is
    `alpha (K - 1) sum_l (sqrt(N n_l) |s(0)| + B_Ub (B_x + sqrt N))`, which bounds all states while
    `|W_l| <= 1`. Solves start at zero and make `steps` passes, so that `K = steps + 1`. All is
    computed in float64, with the Jacobian in full: for small networks.

    Args:
        layer: The layer, with one `alpha` for all layers and no regulariser.
        head: `W_(L+1)`; its bias is not trained.
        x: The inputs, shape (N, d).
        y: The targets, shape (N, outputs).
        steps: Passes through the layers.
        extractor_lipschitz: `L_g`, at least 1; 1 if there is no extractor.
    """
    network = UnrolledNetwork.read(layer, head, x, y, steps)
    require_positive("training_bound.extractor_lipschitz", extractor_lipschitz)
    if extractor_lipschitz < 1:
        key = "training_bound.extractor_lipschitz"
        raise SettingError(key, "be at least 1, as the proof needs it", extractor_lipschitz)
    constants, assumptions = find_constants(network, extractor_lipschitz)
    theta = network.theta
    jacobian = torch.func.jacrev(network.output)(theta)  # (N outputs, parameters)
    kernel = torch.linalg.eigvalsh(jacobian @ jacobian.mT)
    smallest, largest = float(kernel[0].clamp_min(0)), float(kernel[-1])
    step = min(1 / constants["Q0"] if constants["Q0"] else math.inf, 1 / constants["Q1"])
    lemmas = measure_lemmas(network, constants, extractor_lipschitz)
    best = 1 / lemmas[-1].value
    for _ in range(MAX_HALVINGS):
        if _descend(network, best) < 1:
            break
        best /= 2
    return TrainingBound(
        assumptions,
        lemmas,
        constants,
        step,
        1 - step * constants["Q0"],
        _descend(network, step),
        best,
        _descend(network, best),
        (smallest, largest),
    )


def _descend(network: UnrolledNetwork, step: float, count: int = 10) -> float:
    """The factor of the loss in one step of gradient descent, on average over some."""
    theta = network.theta
    gradient = torch.func.grad(network.loss)
    for _ in range(count):
        theta = theta - step * gradient(theta)
    first, last = float(network.loss(network.theta)), float(network.loss(theta))
    if first == 0:
        return 1.0
    ratio = last / first
    return float(ratio ** (1 / count)) if math.isfinite(ratio) else math.inf
