"""Proofs about the equilibria of a layer or a model, asked of their cells."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import nn

from equipoise.core.validate import SettingError, require_type
from equipoise.layers import Cell, Certificate, Equilibrium
from equipoise.layers.certificate import significant
from equipoise.layers.declarations import certificate_of

__all__ = ["certify", "require_finite_weights", "require_layer"]


@overload
def certify(layer: Equilibrium, *, strict: bool = True) -> Certificate: ...  # type: ignore[overload-overlap]
@overload
def certify(layer: nn.Module, *, strict: bool = True) -> dict[str, Certificate]: ...
@torch.no_grad()
def certify(layer: nn.Module, *, strict: bool = True) -> Certificate | dict[str, Certificate]:
    """Prove that a layer has one equilibrium for every input, and return the numbers.

    The step of an OptEq has at most the Lipschitz constant
    `prod_l (alpha_l L_s |W_l|^2/mu + 1 - alpha_l)`; other cells say their own. A skip with the
    fraction `a` of the new value makes `L` to `a L + 1 - a`; a change of variable multiplies it by
    its condition number; a regulariser by 1 if it is convex and its step a proximal map or short,
    and by `1 + gamma L_R` otherwise, with `L_R` a Lipschitz constant of its gradient.

    The proof is that of a contraction, or another that the cell's certificate has (a `Statement`
    that is `unique`). It fails if any statement is refuted; those that are open beside it do not
    matter.

    Args:
        layer: An equilibrium layer, or a model that holds some.
        strict: Whether to raise `ValueError` where the proof fails, rather than return a
            certificate that says so.

    Returns:
        The certificate of a layer; of a model, those of all its equilibrium layers by name.
    """
    if isinstance(layer, Equilibrium):
        return _certify("certify.layer", layer, strict)
    named = layer.named_modules() if isinstance(layer, nn.Module) else ()
    layers = {name: part for name, part in named if isinstance(part, Equilibrium)}
    if not layers:
        require_layer("certify", layer)
    return {name: _certify(f"certify.{name}", part, strict) for name, part in layers.items()}


def _certify(key: str, layer: Equilibrium, strict: bool) -> Certificate:
    require_finite_weights(key, layer)
    certificate = certificate_of(layer.cell)
    if strict and not certificate.holds:
        raise _refusal(key, certificate)
    return certificate


def require_layer(owner: str, layer: object) -> None:
    """Raise unless `layer` is an equilibrium layer, with a hint what to give instead."""
    remedy = (
        "Wrap it: Equilibrium(cell)."
        if isinstance(layer, Cell)
        else "Give the layer inside it, such as model.equilibrium."
    )
    require_type(
        f"{owner}.layer", layer, Equilibrium, "an Equilibrium, such as OptEq or OptEqConv2d", remedy
    )


def require_finite_weights(key: str, layer: Equilibrium) -> None:
    """Raise if a parameter is not finite or a buffer holds NaN: nothing can be said of those."""
    for name, weight in layer.cell.named_parameters():
        if not bool(weight.isfinite().all()):
            raise SettingError(key, "have finite weights", weight, got=f"NaN or infinity in {name}")
    for name, buffer in layer.cell.named_buffers():
        if bool(buffer.isnan().any()):  # infinity is what attention masks are made of
            raise SettingError(key, "have buffers without NaN", buffer, got=f"NaN in {name}")


def _refusal(key: str, certificate: Certificate) -> SettingError:
    """The first link of the proof that breaks, and what helps."""
    bound, remedy = certificate.lipschitz, certificate.remedy
    refuted = [one for one in certificate.statements if one.holds is False]
    failed = refuted or [one for one in certificate.further if one.unique]
    if failed:
        got = "; ".join(map(str, failed))
        return SettingError(key, "have a proof of what it claims", bound, remedy, got=got)
    rule = "have a Lipschitz constant below 1"
    own = certificate.chain[0].lipschitz if certificate.chain else math.inf
    if own == math.inf:
        name = certificate.chain[0].name if certificate.chain else "a cell"
        return SettingError(key, rule, bound, remedy, got=f"{name}, of which none is known")
    for (_, before), (name, after) in zip(certificate.chain, certificate.chain[1:], strict=False):
        if before < 1 <= after:
            what = significant(after, 6) if after < math.inf else "no known constant"
            return SettingError(
                key,
                rule,
                bound,
                "Use a convex regulariser with a proximal map, a smaller strength, or an "
                "orthogonal matrix.",
                got=f"{significant(before, 6)} for its layers but {what} after {name}",
            )
    got = significant(own, 6)
    if certificate.factors:
        worst = max(certificate.factors, key=lambda factor: factor.value)
        got += (
            f", because {worst.name} of {len(certificate.factors)} has the factor "
            f"{worst.value:.6g} (|W| <= {worst.norm:.6g})"
        )
    return SettingError(key, rule, bound, remedy, got=got)
