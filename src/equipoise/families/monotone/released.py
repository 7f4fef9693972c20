"""The weights of the dense network that the authors of monotone operator networks released."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from equipoise.core.errors import SourceError
from equipoise.core.validate import SettingError, require_type
from equipoise.families.monotone.layer import MonotoneDense
from equipoise.layers.options import SolveOptions
from equipoise.models.image_network import ImageNetwork

__all__ = ["from_released", "read_released"]

NAMES = {
    "mon.linear_module.U.weight": "equilibrium.cell.inputs.weight",
    "mon.linear_module.U.bias": "equilibrium.cell.inputs.bias",
    "mon.linear_module.A.weight": "equilibrium.cell.operator.A",
    "mon.linear_module.B.weight": "equilibrium.cell.operator.B",
    "Wout.weight": "head.weight",
    "Wout.bias": "head.bias",
}
"""The names of the released tensors, and of ours; their layout is the same."""


def from_released(
    state_dict: Mapping[str, Tensor],
    *,
    margin: float,
    input_shape: Sequence[int] = (1, 28, 28),
    **solve: Unpack[SolveOptions],
) -> ImageNetwork:
    """Return the network of a released dense model: `mnist_fc_model_trained.pt` and its like.

    | released | here |
    |---|---|
    | `mon.linear_module.U.weight`, `.bias` | `equilibrium.cell.inputs.weight`, `.bias` |
    | `mon.linear_module.A.weight` | `equilibrium.cell.operator.A` |
    | `mon.linear_module.B.weight` | `equilibrium.cell.operator.B` |
    | `Wout.weight`, `.bias` | `head.weight`, `.bias` |

    The margin is not in the file, and the same tensors are another network with another one: the
    authors trained with `m = 1`, and with `m = 20` for the bounds of Pabbaraju et al. (2021). Nor
    are mean and deviation by which images are to be standardised, 0.1307 and 0.3081 for MNIST.

    Args:
        state_dict: The tensors by name, as `torch.load(path, weights_only=True)` returns them.
        margin: The margin `m` with which the model was trained.
        input_shape: Channels, height and width of the images.
        **solve: As for `MonotoneDense`.
    """
    key = "from_released.state_dict"
    require_type(key, state_dict, Mapping, "a mapping of names to tensors")
    if set(state_dict) != set(NAMES):
        missing = sorted(set(NAMES) - set(state_dict))
        extra = sorted(set(state_dict) - set(NAMES))
        raise SettingError(
            key,
            "hold the tensors of a dense model, A, B, U and Wout",
            state_dict,
            got=f"{missing or 'none'} missing and {extra or 'none'} besides",
        )
    found = {NAMES[name]: tensor for name, tensor in state_dict.items()}
    features, numbers = found["equilibrium.cell.inputs.weight"].shape
    if numbers != math.prod(input_shape):
        raise SettingError(
            "from_released.input_shape",
            f"have {numbers} numbers, as the columns of U",
            tuple(input_shape),
        )
    layer = MonotoneDense(numbers, features, margin, **solve)
    head = nn.Linear(features, len(found["head.weight"]))
    model = ImageNetwork(nn.Flatten(), layer, head, input_shape)
    for name, own in model.state_dict().items():
        if own.shape != found[name].shape:
            wanted, given = tuple(own.shape), tuple(found[name].shape)
            raise SettingError(
                key,
                f"hold tensors that fit together, {name} of shape {wanted}",
                state_dict,
                got=f"shape {given}",
            )
    with torch.no_grad():
        model.to(found["head.weight"].dtype).load_state_dict(found)
    return model


def read_released(path: str, *, margin: float = 1.0, **options: Any) -> ImageNetwork:
    """Return the network whose tensors are in a file that `torch.save` wrote.

    Args:
        path: The file; nothing in it but tensors is read.
        margin: As of `from_released`.
        **options: The layer's other options.
    """
    if not Path(path).is_file():
        raise SourceError(path, "must be a file with released weights; there is none.")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        rule = "must hold tensors alone, as torch.save(model.state_dict(), path) writes them"
        # What torch says of a file that it will not unpickle is how to run code from it.
        known = not isinstance(error, pickle.UnpicklingError)
        reason = str(error).partition("\n")[0] if known else "it holds something else."
        raise SourceError(path, f"{rule}: {reason}") from error
    try:
        return from_released(tensors, margin=margin, **options)
    except SettingError as error:
        raise SourceError(path, error) from error
