"""Muon: momentum whose directions are all of one length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from equipoise.core import SettingError, choose, require_between, require_flag, require_positive

__all__ = ["Muon", "hidden_matrices"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial that lifts small singular values fastest (Jordan et al., 2024)."""

ITERATIONS = 5
"""After these, singular values above 0.3 % of the largest lie between about 0.7 and 1.2."""

LAST_PARTS = ("classifier", "head")

SETTINGS = (
    "params",
    "param_names",
    "orthogonal",
    "lr",
    "initial_lr",
    "rate",
    "momentum",
    "weight_decay",
)
"""What a group to orthogonalise may say."""


@final
class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices and kernels, AdamW for everything else.

    `M <- momentum M + G`, `W <- W - rate 0.2 sqrt(max(n, m)) O(G + momentum M)`, where `O` makes
    all singular values of an `n x m` matrix about 1 (Jordan et al., 2024) and the factor gives the
    step the size of AdamW's (Liu et al., 2025), so that one learning rate serves both. Kernels
    count as matrices with a row for each output channel.

    `torch.optim.Muon` takes no kernels, and computes in bfloat16, which CPUs are slow at.

    Args:
        groups: Groups of parameters; those with `orthogonal = True` have at least two dimensions.
        lr: Learning rate.
        momentum: Decay of the sum of gradients, in [0, 1).
        betas: Decays of AdamW's averages.
        eps: Added to AdamW's denominator.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        require_positive("Muon.lr", lr, or_zero=True)
        require_positive("Muon.eps", eps, or_zero=True)
        for name, value in (("momentum", momentum), *(("betas", beta) for beta in betas)):
            require_between(f"Muon.{name}", value, 0, 1, "[)")
        made = [_complete(group) for group in groups]
        others = [group for group in made if not group["orthogonal"]]
        self._adamw = torch.optim.AdamW(others, lr, betas, eps) if others else None
        super().__init__(made, {"lr": lr, "momentum": momentum})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_adamw": self._adamw}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step.

        Args:
            closure: Computes the loss and its gradients anew.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["orthogonal"]:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._turn(weight, weight.grad, group)
        if self._adamw is not None:
            # Both are new objects after `load_state_dict`.
            self._adamw.param_groups = [g for g in self.param_groups if not g["orthogonal"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _turn(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Move one weight."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        total = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        direction = gradient.add(total, alpha=group["momentum"]).flatten(1)
        size = 0.2 * math.sqrt(max(direction.shape))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(_orthogonalize(direction).view_as(weight), alpha=-group["lr"] * size)


def _complete(group: object) -> dict[str, Any]:
    """A group with all that it must say, or a refusal of what cannot be orthogonalised."""
    if not isinstance(group, dict) or "params" not in group:
        # A list of parameters does not say which of them are a model's last map.
        raise SettingError(
            "Muon.groups",
            "be groups of parameters, those to orthogonalise with orthogonal=True",
            group,
            'Use make_optimizer(model, OptimizerConfig(name="muon")), which makes them.',
            got="a group without params" if isinstance(group, dict) else type(group).__name__,
        )
    given = group["params"]
    params = [given] if isinstance(given, Tensor) else list(given)
    made = {"orthogonal": False, "weight_decay": 0.0} | group | {"params": params}
    require_flag("Muon.groups.orthogonal", made["orthogonal"])
    if made["orthogonal"] and any(weight.dim() < 2 for weight in params):
        rule = "have at least two dimensions to be orthogonalised"
        raise SettingError("Muon.groups.params", rule, params, got="a vector or a number")
    if made["orthogonal"]:
        for name in made:  # those of AdamW, such as maximize, would change nothing
            choose("Muon.groups", name, SETTINGS, "have only the settings")
    return made


def _orthogonalize(matrix: Tensor) -> Tensor:
    """Return `U V^H`, nearly, of a matrix `U S V^H`; zero for zero."""
    if not matrix.numel():
        return matrix
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mH if tall else matrix
    tiny = torch.finfo(x.dtype).tiny
    # By the largest entry first: the squares of small ones would be zero, and so would the norm.
    x = x / x.abs().amax().clamp(min=tiny)
    x = x / torch.linalg.vector_norm(x).clamp(min=tiny)
    for _ in range(ITERATIONS):
        gram = x @ x.mH
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mH if tall else x


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon orthogonalises.

    They are the matrices and kernels, without embeddings and the last map of a model, for which the
    method is not meant: the last matrix of a part called `classifier` or `head`, and those that a
    module names in an attribute `last_maps`. What has one row or one column, as a bias for each
    channel, is no matrix.

    Args:
        model: Whose parameters.
    """
    found, last, others = dict[str, Tensor](), dict[str, Tensor](), list[Tensor]()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            others.append(module.weight)
            continue
        words = prefix.split(".")
        part = next((at for at, word in enumerate(words, 1) if word in LAST_PARTS), 0)
        for name, weight in module.named_parameters(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if weight.dim() < 2:
                continue
            if own in getattr(module, "last_maps", ()):
                others.append(weight)
            elif len(weight) > 1 and weight.numel() > len(weight):
                found[name] = weight
                if part:
                    last[".".join(words[:part])] = weight
    # By identity: a weight that is tied to one of these is what that is.
    excluded = {id(weight) for weight in (*others, *last.values())}
    return {name for name, weight in found.items() if id(weight) not in excluded}
