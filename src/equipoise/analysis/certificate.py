"""Proofs about the equilibria of a layer or a model, asked of their cells."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import overload

import torch
from torch import nn

from equipoise.analysis.spectrum import spectral_radius
from equipoise.core.errors import ConvergenceWarning
from equipoise.core.module_mode import evaluation_mode
from equipoise.core.tree import Layout, Tree
from equipoise.core.validate import SettingError, require_type
from equipoise.layers import Cell, Certificate, Equilibrium, Link, Statement
from equipoise.layers.belief import certificate_of, find_layer_refusal
from equipoise.layers.certificate import significant

__all__ = ["certify", "require_finite_weights", "require_layer"]

MAX_POINTS = 4
"""Samples at whose equilibria a spectral radius is measured."""


@overload
def certify(  # type: ignore[overload-overlap]
    layer: Equilibrium, x: Tree | None = None, *, strict: bool = True
) -> Certificate: ...
@overload
def certify(
    layer: nn.Module, x: Tree | None = None, *, strict: bool = True
) -> dict[str, Certificate]: ...
@torch.no_grad()
def certify(
    layer: nn.Module, x: Tree | None = None, *, strict: bool = True
) -> Certificate | dict[str, Certificate]:
    """Prove that a layer has one equilibrium for every input, and return the numbers.

    The step of an OptEq has at most the Lipschitz constant
    `prod_l (alpha_l L_s |W_l|^2/mu + 1 - alpha_l)`; other cells say their own. A skip with the
    fraction `a` of the new value makes `L` to `a L + 1 - a`; a change of variable multiplies it by
    its condition number; a regulariser by 1 if it is convex and its step a proximal map or short,
    and by `1 + gamma L_R` otherwise, with `L_R` a Lipschitz constant of its gradient.

    The proof is that of a contraction, or another that the cell's certificate has (a `Statement`
    that is `unique`). It fails if any statement is refuted; those that are open beside it do not
    matter. A further statement is about the rate of the solver in use.

    Args:
        layer: An equilibrium layer, or a model that holds some.
        x: Some samples. Where nothing is proved, the spectral radius of the step's Jacobian at
            their equilibria is measured in evaluation mode, which proves nothing of others.
        strict: Whether to raise `ValueError` where the proof fails, rather than return a
            certificate that says so.

    Returns:
        The certificate of a layer; of a model, those of all its equilibrium layers by name.
    """
    if isinstance(layer, Equilibrium):
        return _certify("certify.layer", layer, strict, lambda: x)
    named = layer.named_modules() if isinstance(layer, nn.Module) else ()
    layers = {name: part for name, part in named if isinstance(part, Equilibrium)}
    if not layers:
        require_layer("certify", layer)
    given: dict[str, Tree] = {}

    def inputs_of(name: str) -> Tree | None:
        if x is not None and not given:
            given.update(_find_inputs(layer, layers, x))
        return given.get(name)

    return {
        name: _certify(f"certify.{name}", part, strict, partial(inputs_of, name))
        for name, part in layers.items()
    }


def _certify(
    key: str, layer: Equilibrium, strict: bool, find_input: Callable[[], Tree | None]
) -> Certificate:
    require_finite_weights(key, layer.cell)
    certificate = certificate_of(layer.cell)
    reason = find_layer_refusal(layer)
    if reason is not None:
        name = type(layer).__name__
        remedy = "Certify the cell in a plain layer: Equilibrium(layer.cell)."
        certificate = Certificate((Link(name, math.inf),), basis=reason, remedy=remedy)
    if strict and not certificate.holds:
        raise _refusal(key, certificate)
    certificate = replace(certificate, rate=state_rate(layer, certificate))
    if certificate.holds:
        return certificate
    x = find_input()
    if x is None:
        return certificate
    with _evaluating(layer):
        measured = measure_radius(layer, x)
    return replace(certificate, further=(*certificate.further, measured))


def state_rate(layer: Equilibrium, certificate: Certificate) -> Statement | None:
    """Return what is proved of the rate of the solver that a layer uses; None if nothing is.

    Args:
        layer: The layer.
        certificate: What is proved of its cell.
    """
    if not certificate.contracts:
        return None
    solver, factor = layer.solver_in_use, certificate.lipschitz
    name, rate, besides = type(solver).__name__, solver.rate(factor), ""
    if rate is None:  # what is proved is said of what could be used in its place
        besides = f"; no better one is proved of {name}, which is in use"
        name, rate = "plain iteration", factor
    claim = f"each step of {name} shortens the distance to the equilibrium by this factor at least"
    return Statement(claim, True, rate, 1 - rate, f"Banach's fixed-point theorem{besides}")


def measure_radius(layer: Equilibrium, x: Tree) -> Statement:
    """Return the spectral radius of the step's Jacobian at some equilibria, which proves nothing.

    Args:
        layer: The layer.
        x: Inputs of it; the first few are used.
    """
    few = Layout(x)
    packed = few.pack(x, "x")[:MAX_POINTS]
    some = few.unpack(packed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the statement tells
        solution = layer.solve(some)
        state = layer.last.value if layer.last is not None else solution.value
        found = spectral_radius(layer.map(some), state)
    missed = int((~solution.converged).sum())
    largest = float(found.value.max())
    rough = "" if bool(found.settled.all()) else ", roughly"
    where = f"the equilibria of {len(packed)} samples"
    if missed:
        where = f"what the solver found for {len(packed)} samples, of which it missed {missed}"
    return Statement(
        f"measured spectral radius of the step's Jacobian at {where}{rough}",
        number=largest,
        margin=1 - largest,
        theorem="a measurement, which says nothing of other samples",
    )


def _find_inputs(model: nn.Module, layers: Mapping[str, Equilibrium], x: Tree) -> dict[str, Tree]:
    """What each layer is given when a model gets some samples."""
    found: dict[str, Tree] = {}

    def listen(name: str, stack: ExitStack) -> None:
        def keep(_: nn.Module, inputs: tuple[Tree, ...]) -> None:
            found.setdefault(name, inputs[0])

        stack.callback(layers[name].register_forward_pre_hook(keep).remove)

    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name in layers:
            listen(name, stack)
        model(x)
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module has its own mode again, and its own last solve."""
    logs = [one.solves for one in model.modules() if isinstance(one, Equilibrium)]
    before = [dict(vars(log)) for log in logs]
    try:
        with evaluation_mode(model):
            yield
    finally:
        for log, values in zip(logs, before, strict=True):
            vars(log).update(values)


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


def require_finite_weights(key: str, module: nn.Module) -> None:
    """Raise if a parameter is not finite or a buffer holds NaN: nothing can be said of those.

    Args:
        key: What to call the module.
        module: A cell, or a whole network.
    """
    for name, weight in module.named_parameters():
        if not bool(weight.isfinite().all()):
            raise SettingError(key, "have finite weights", weight, got=f"NaN or infinity in {name}")
    for name, buffer in module.named_buffers():
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
        why = f": {certificate.basis}" if certificate.basis else ""
        return SettingError(key, rule, bound, remedy, got=f"{name}, of which none is known{why}")
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
