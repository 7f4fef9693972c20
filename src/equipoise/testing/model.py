"""What every model promises."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_type
from equipoise.layers.equilibrium import Equilibrium
from equipoise.models import Model, TextModel, create_model
from equipoise.testing.contract import (
    Report,
    distance,
    pickled,
    require,
    require_close,
    run_checks,
)
from equipoise.testing.trees import leaves

__all__ = ["check_model"]


def check_model(
    model: str | Model | Callable[[], Model],
    x: Tensor | None = None,
    *,
    skip: Iterable[str] = (),
    seed: int = 0,
) -> Report:
    """Raise `ContractError` unless a model keeps every promise that training and prediction need.

    It makes a step of training on a copy, saves and loads that, and predicts.

    Args:
        model: The name of a model, as `create_model` takes it, a model, or a function that makes a
            new one. With a name or a function, loading is checked on a model with other weights.
        x: A batch of at least two samples; by default random ones of the model's `input_shape`, or
            tokens.
        skip: Names of checks to leave out.
        seed: Seed of weights and samples.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(model, str):
            made: object = create_model(model)
        else:
            made = model if isinstance(model, nn.Module) else model()
        require_type(
            "check_model.model", made, Model, "a Model", "Derive its class from equipoise.Model."
        )
        assert isinstance(made, Model)
        if x is None:
            shape = getattr(made, "input_shape", None)
            if isinstance(made, TextModel):
                x = torch.randint(made.num_classes, (2, 8))
            elif shape is None:
                raise SettingError("check_model.x", "be given for a model without input_shape", x)
            else:
                x = torch.randn(2, *shape)
        case = _Case(made, model, x)
    return run_checks("check_model", case.name, case, _CHECKS, skip=skip, seed=seed)


class _Case:
    def __init__(self, model: Model, source: Any, x: Tensor) -> None:
        self.name = type(model).__name__ if model.name == "model" else model.name
        self.source = source
        self.x = x
        self.untrained = copy.deepcopy(model)

    def fresh(self) -> Model:
        """Return a model with other weights, or at least those from before training."""
        if isinstance(self.source, nn.Module):
            return copy.deepcopy(self.untrained)
        return create_model(self.source) if isinstance(self.source, str) else self.source()

    @cached_property
    def trained(self) -> Model:
        """The model after a step of training, in evaluation mode."""
        model = copy.deepcopy(self.untrained).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.autograd.backward(_loss(model(self.x)))
        optimizer.step()
        return model.eval()

    @cached_property
    def expected(self) -> Any:
        """What the trained model predicts."""
        return self.predict(self.trained)

    def predict(self, model: nn.Module, x: Tensor | None = None) -> Any:
        with torch.no_grad():
            return model(self.x if x is None else x)


def _loss(output: Any) -> Tensor:
    """A loss for outputs of any kind: their products with fixed random numbers."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for leaf in leaves(output):
        weight = torch.randn(leaf.shape, generator=generator).to(leaf)
        total = total + (leaf * weight).mean() + leaf.square().mean()
    return total


def _outputs_are_finite_and_batch_first(case: _Case) -> None:
    for leaf in leaves(case.predict(copy.deepcopy(case.untrained).eval())):
        require(
            leaf.dim() > 0 and leaf.shape[0] == len(case.x) and leaf.isfinite().all(),
            case.name,
            f"return finite outputs for {len(case.x)} samples, batch first",
            f"shape {tuple(leaf.shape)}, "
            f"{int((~leaf.isfinite()).sum())} entries that are NaN or infinite",
        )


def _training_reaches_every_parameter(case: _Case) -> None:
    model, before = case.trained, dict(case.untrained.named_parameters())
    require(
        any(not torch.equal(before[name], one) for name, one in model.named_parameters()),
        case.name,
        "change in a step of training",
        "the same parameters as before",
    )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        require(
            grad is not None and grad.isfinite().all() and grad.any(),
            case.name,
            "give every parameter a finite gradient other than zero",
            f"{'none' if grad is None else 'zero, NaN or infinity'} for {name}",
            "Freeze unused parameters by requires_grad_(False), or remove them.",
        )


def _saved_weights_predict_the_same(case: _Case) -> None:
    model = case.trained
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = case.fresh()
    missing, unexpected = other.load_state_dict(torch.load(buffer, weights_only=True), strict=False)
    require(
        not missing and not unexpected,
        f"{case.name}.state_dict",
        "have the keys that load_state_dict asks for",
        f"missing {missing} and unexpected {unexpected}",
    )
    apart = distance(case.predict(other.eval()), case.expected)
    require(
        apart == 0,
        f"{case.name}.state_dict",
        "hold every tensor that training changes, so that a loaded model predicts the same",
        f"predictions that differ by {apart:.1e}",
        "Register tensors as parameters, or as buffers that are persistent.",
    )


def _copies_predict_the_same(case: _Case) -> str | None:
    model = case.trained
    other = pickled(model, case.name)
    for what, twin in (("its deep copy", copy.deepcopy(model)), ("its pickle", other)):
        if isinstance(twin, str):
            continue
        apart = distance(case.predict(twin), case.expected)
        require(
            apart == 0 and twin.name == model.name,
            case.name,
            f"predict the same as {what}, under the same name",
            f"a difference of {apart:.1e} and the name {twin.name!r}",
        )
    return other if isinstance(other, str) else None


def _evaluation_changes_nothing(case: _Case) -> None:
    model = case.trained
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apart = distance(case.predict(model), case.expected)
    require(
        apart == 0,
        case.name,
        "predict the same twice in evaluation mode",
        f"a difference of {apart:.1e}",
        "Draw random numbers in training mode only.",
    )
    for name, tensor in model.state_dict().items():
        require(
            torch.equal(tensor, before[name]),
            case.name,
            "leave its tensors alone in evaluation mode",
            f"another {name}",
            "Update statistics in training mode only.",
        )


def _samples_are_independent(case: _Case) -> str | None:
    model = case.trained
    if any(layer.cell.coupled for layer in model.equilibria().values()):
        return "an equilibrium of it declares that its samples are coupled"
    alone = case.predict(model, case.x[1:2])
    for one, all_of_them in zip(leaves(alone), leaves(case.expected), strict=True):
        require_close(
            one,
            all_of_them[1:2],
            1e-4,
            case.name,
            "predict each sample for itself in evaluation mode",
            "Use running statistics in evaluation mode.",
        )
    return None


def _parameter_counts_add_up(case: _Case) -> None:
    counts = case.untrained.parameter_counts()
    total = sum(parameter.numel() for parameter in case.untrained.parameters())
    parts = sum(count for name, count in counts.items() if name != "total")
    require(
        counts.get("total") == total and (len(counts) == 1 or parts == total),
        f"{case.name}.parameter_counts",
        f"give total = {total} and parts that add up to it",
        f"{counts}",
    )


def _equilibria_are_its_own(case: _Case) -> None:
    modules = {id(module) for module in case.trained.modules()}
    for name, layer in case.trained.equilibria().items():
        require(
            isinstance(layer, Equilibrium) and id(layer) in modules,
            f"{case.name}.equilibria",
            "return equilibrium layers that are modules of the model",
            f"{type(layer).__name__} for {name!r}",
        )
        require(
            layer.last is not None,
            f"{case.name}.equilibria",
            "name only layers that a prediction solves",
            f"{name!r}, which was not solved",
        )


def _prepare_is_what_forward_takes(case: _Case) -> None:
    require_close(
        case.predict(case.trained, case.trained.prepare(case.x)),
        case.expected,
        1e-6,
        f"{case.name}.prepare",
        "leave samples alone that it has prepared",
    )


_CHECKS: tuple[Any, ...] = (
    _outputs_are_finite_and_batch_first,
    _training_reaches_every_parameter,
    _evaluation_changes_nothing,
    _saved_weights_predict_the_same,
    _copies_predict_the_same,
    _samples_are_independent,
    _parameter_counts_add_up,
    _equilibria_are_its_own,
    _prepare_is_what_forward_takes,
)
