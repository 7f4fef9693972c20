"""The empirical neural tangent kernel of any model: exact, in chunks, and its spectrum.

`K = J J^T`, `J = d outputs/d parameters` (Jacot et al., 2018). Along the gradient flow of
`|f(x) - y|^2/2` the outputs move by `df/dt = -K (f - y)`, so that the smallest eigenvalue bounds
the rate from below.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from equipoise.core.memory import available_memory, require_memory
from equipoise.core.module_mode import evaluation_mode
from equipoise.core.registry import choose
from equipoise.core.validate import SettingError, require_count
from equipoise.gradients import Implicit
from equipoise.layers.equilibrium import Equilibrium

__all__ = ["jacobian_rows", "kernel_spectrum", "tangent_kernel"]

Method = Literal["auto", "func", "samples"]

MEMORY_FRACTION = 0.5
"""Of the free memory, for rows of the Jacobian."""
MAX_CHUNK = 64
"""Samples differentiated together; more gain no speed."""
CLOSE = 0.8
"""Equilibria are solved to this power of the rounding unit: 3e-13 in float64, 3e-6 in float32."""
MIN_STEPS = 2000
"""Steps that such a solve may take."""


def tangent_kernel(
    model: nn.Module, x: Tensor, *, chunk: int | None = None, method: Method = "auto"
) -> Tensor:
    """Return `J J^T`, the tangent kernel at samples, for all outputs and trainable parameters.

    The Jacobian is never held as a whole unless it fits: chunks of its rows are made anew for each
    block of the kernel, so that the result is exact at any size. The model runs in evaluation mode.

    Equilibria are solved close to rounding and differentiated implicitly, however loosely the model
    does so itself: small eigenvalues would be those of its tolerance. A solve that does not get
    there is told as the layer says (`on_failure`).

    Args:
        model: The model, from a batch to a batch of outputs.
        x: Samples, batch first.
        chunk: Samples whose Jacobians are held together; by default as many as fit.
        method: `func` differentiates all samples of a chunk together by `torch.func`, `samples`
            each by itself, and `auto` the first if the model allows it.

    Shape:
        (samples * outputs, samples * outputs), the outputs of a sample side by side.
    """
    count = sum(one.numel() for one in _trainable(model).values())
    outputs = _count_outputs(model, x)
    itemsize = next(iter(_trainable(model).values())).element_size()
    rows = len(x) * outputs
    sample = outputs * count * itemsize
    require_memory(
        "tangent_kernel.x",
        rows**2 * itemsize + 2 * sample,
        f"a kernel of {rows:,} x {rows:,} and rows of {count:,} numbers",
        "Take fewer samples or a smaller network.",
    )
    if chunk is None:
        budget = MEMORY_FRACTION * (available_memory() or 4 * 2**30) - rows**2 * itemsize
        chunk = max(1, min(int(budget / (2 * sample)), MAX_CHUNK))
    require_count("tangent_kernel.chunk", chunk)
    parts = torch.split(x, chunk)
    kernel = x.new_zeros(rows, rows, dtype=next(iter(_trainable(model).values())).dtype)
    begin = 0
    for index, part in enumerate(parts):
        left = jacobian_rows(model, part, method=method)
        end = begin + len(left)
        kernel[begin:end, begin:end] = left @ left.T
        other = end
        for further in parts[index + 1 :]:
            right = jacobian_rows(model, further, method=method)
            block = left @ right.T
            kernel[begin:end, other : other + len(right)] = block
            kernel[other : other + len(right), begin:end] = block.T
            other += len(right)
        begin = end
    return kernel


def kernel_spectrum(kernel: Tensor) -> Tensor:
    """Return the eigenvalues of a kernel, the smallest first.

    Args:
        kernel: Symmetric, shape (rows, rows).
    """
    eigenvalues: Tensor = torch.linalg.eigvalsh((kernel + kernel.mT) / 2)
    return eigenvalues


def jacobian_rows(model: nn.Module, x: Tensor, *, method: Method = "auto") -> Tensor:
    """Return the derivatives of all outputs at samples in all trainable parameters.

    Args:
        model: The model.
        x: Samples.
        method: As of `tangent_kernel`.

    Shape:
        (samples * outputs, parameters), parameters in the order of `named_parameters`.
    """
    choose("tangent_kernel.method", method, ("auto", "func", "samples"))
    with evaluation_mode(model), _solved_closely(model):
        if method == "samples":
            return torch.cat(list(_rows_of_samples(model, x)))
        try:
            return _rows_by_func(model, x)
        except (RuntimeError, ValueError, NotImplementedError):
            if method == "func":
                raise
            return torch.cat(list(_rows_of_samples(model, x)))


@contextmanager
def _solved_closely(model: nn.Module) -> Iterator[None]:
    """Let equilibrium layers solve close to rounding while the context lasts."""
    layers = [each for each in model.modules() if isinstance(each, Equilibrium)]
    before = [(each.stop, each.gradient, each.eval_options) for each in layers]
    tolerance = torch.finfo(next(iter(_trainable(model).values())).dtype).eps ** CLOSE
    try:
        for layer in layers:
            layer.eval_options = {}
            layer.stop = replace(
                layer.stop,
                tolerance=min(tolerance, layer.stop.tolerance),
                max_steps=max(MIN_STEPS, layer.stop.max_steps),
                patience=max(MIN_STEPS, layer.stop.patience),
            )
            own = layer.gradient
            layer.gradient = Implicit(own.solver if isinstance(own, Implicit) else "auto")
        yield
    finally:
        for layer, (stop, gradient, options) in zip(layers, before, strict=True):
            layer.stop, layer.gradient, layer.eval_options = stop, gradient, options


def _rows_by_func(model: nn.Module, x: Tensor) -> Tensor:
    parameters = {name: one.detach() for name, one in _trainable(model).items()}

    def output(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        result: Tensor = functional_call(model, values, (sample[None],))
        return result.reshape(-1)

    found = vmap(jacrev(output), in_dims=(None, 0))(parameters, x)
    return torch.cat([one.flatten(2) for one in found.values()], dim=2).flatten(0, 1)


def _rows_of_samples(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    parameters = list(_trainable(model).values())
    for sample in x:
        with torch.enable_grad():
            outputs = model(sample[None]).reshape(-1)
            for output in outputs:
                found = torch.autograd.grad(
                    output, parameters, retain_graph=True, materialize_grads=True
                )
                yield torch.cat([one.reshape(-1) for one in found])[None]


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {
        name: one for name, one in model.named_parameters() if one.requires_grad
    }
    if not found:
        raise SettingError(
            "tangent_kernel.model", "have parameters to train", model, got=type(model).__name__
        )
    return found


def _count_outputs(model: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), evaluation_mode(model), _solved_closely(model):
        outputs = model(x[:1])
    return int(outputs.numel())
