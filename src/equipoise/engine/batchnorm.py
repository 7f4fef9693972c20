"""Batch normalisation over the samples of several processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from equipoise.layers import Cell

__all__ = ["SyncedBatchNorm", "gather", "synchronize"]


class SyncedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation, in training, by mean and variance over the samples of all processes.

    As `torch.nn.SyncBatchNorm`, but on CPUs too. Processes may have different numbers of samples,
    or none. In evaluation, and without a group of processes, it is what `torch.nn.BatchNorm2d` is;
    its state is the same.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalise each channel.

        Args:
            input: Shape `(samples, channels, ...)`.
        """
        if (
            not self.training
            or not dist.is_available()
            or not dist.is_initialized()
            or dist.get_world_size() == 1
        ):
            return super().forward(input)
        self._check_input_dim(input)
        with torch.no_grad():
            mean, variance, count = _statistics(input)
            if (
                self.track_running_stats
                and self.running_mean is not None
                and self.running_var is not None
            ):
                factor = self.momentum
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
                    factor = 1 / float(self.num_batches_tracked) if factor is None else factor
                factor = 0.0 if factor is None else factor
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(
                    (variance * (count / (count - 1))).to(self.running_var.dtype), factor
                )
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            input, self.weight, self.bias, mean, variance, count, self.eps
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncedBatchNorm.input must have shape (samples, {self.num_features}, ...); "
                f"got {tuple(input.shape)}."
            )


def synchronize(model: nn.Module) -> nn.Module:
    """Replace each `BatchNorm1d`, `2d` and `3d` of a model by `SyncedBatchNorm`, in place.

    Parameters and buffers stay the same objects. Those in the cell of an equilibrium layer are not
    replaced, since processes make different numbers of steps: a cell that is not `coupled` uses
    them in evaluation mode only, and one that is, is refused.

    Args:
        model: The model.
    """
    made: dict[nn.Module, nn.Module] = {}

    def convert(module: nn.Module) -> nn.Module:
        if module in made:
            return made[module]
        if isinstance(module, Cell):
            if module.coupled and any(
                isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()
            ):
                raise ValueError(
                    f"{type(module).__name__} must not have batch normalisation when several "
                    "processes train it, since their "
                    "solves make different numbers of steps; got some. Use GroupNorm or LayerNorm."
                )
            return module
        made[module] = (
            _convert(module)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
            else module
        )
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = convert(child)
        return made[module]

    return convert(model)


def _convert(norm: nn.modules.batchnorm._BatchNorm) -> SyncedBatchNorm:
    new = SyncedBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        device="meta",
    )
    new._parameters, new._buffers = norm._parameters, norm._buffers
    return new.train(norm.training)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel, and how many values they are of, over all processes.

    Each sends its own in one message, and all combine them in the same order (Chan, Golub &
    LeVeque, 1979), so that the results are the same to the last bit, and stable: no difference of
    large squares.
    """
    channels = x.shape[1]
    own = x.numel() // channels
    wide = torch.promote_types(x.dtype, torch.float32)
    message = torch.zeros(2 * channels + 1, dtype=wide, device=x.device)
    if own:
        # Several times faster than var_mean; leaves running statistics, not given here, alone.
        mean, variance = torch.batch_norm_update_stats(x.to(wide), None, None, 0.0)
        message = torch.cat([mean, variance, message.new_full((1,), own)])
    parts = gather(message)
    means, variances, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1:]
    count = counts.sum()
    # Whoever has several values knows that there are several, without a look at the total, for
    # which a GPU would have to stop.
    if own <= 1 and count <= 1:
        raise ValueError(
            "SyncedBatchNorm.input must have more than one value for each channel in "
            f"training; got {int(count)}."
        )
    mean = (counts * means).sum(0) / count
    return mean, (counts * (variances + (means - mean).square())).sum(0) / count, count


class _Normalize(torch.autograd.Function):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, with statistics of all processes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps = eps
        return nn.functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        # The gradient as if the statistics were constants, then what they add.
        direct, dot, total = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():
            direct, dot, total = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        sums = torch.cat([dot, total]).to(mean.dtype)
        dist.all_reduce(sums)
        dots, totals = sums.chunk(2)
        scale = (
            (variance + ctx.eps).rsqrt()
            if weight is None
            else (variance + ctx.eps).rsqrt() * weight
        )
        slope = scale * dots / count * (variance + ctx.eps).rsqrt()
        offset = scale * totals / count - slope * mean
        shape = (-1, *[1] * (x.dim() - 2))
        through = torch.addcmul(offset.view(shape), slope.view(shape), x)
        needs = ctx.needs_input_grad
        return (
            direct - through.to(direct.dtype),
            dot if needs[1] else None,
            total if needs[2] else None,
            None,
            None,
            None,
            None,
        )


def gather(tensor: Tensor) -> Tensor:
    """Return the tensors of all processes, stacked.

    Args:
        tensor: This process's; the same shape and dtype in all.
    """
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)
