"""What the output of a language model must not depend on: other texts, and later tokens.

A network that mixes up the batch and the time of a sequence gives outputs of the right shape. It
learns from its neighbours in a batch, scores well by it, and predicts nonsense for a sample alone.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from equipoise.core import ConvergenceError, SettingError
from equipoise.core.module_mode import evaluation_mode
from equipoise.data import Dataset
from equipoise.engine.solve_monitor import SolveMonitor
from equipoise.engine.tasks import Task

__all__ = ["check_dependence", "check_model", "trial_size"]

TRIED = 3  # samples that a model is tried on

# Changes that count, as fractions of that of the sample that was changed and of the largest output.
# A solve may end a step earlier or later in another batch, which changes outputs a little.
MIN_FRACTION, MIN_CHANGE = 1e-2, 1e-3


def trial_size(dataset: Dataset) -> int:
    """Return how many samples to try a model on: another number than that of tokens in a text.

    Args:
        dataset: Where they come from.
    """
    return TRIED + 1 if dataset.shape == (TRIED,) else TRIED


def check_model(
    model: nn.Module, task: Task, x: Tensor, y: Tensor, output: Tensor | None = None
) -> None:
    """Raise `SettingError` unless a model's outputs are what a task needs.

    Args:
        model: The model, which is left in its mode.
        task: The task.
        x: Samples, ready for the model, as many as `trial_size` says or fewer.
        y: Their targets.
        output: What the model returned for them in evaluation, if that is known.
    """
    if output is None:
        with torch.no_grad(), evaluation_mode(model):
            output = model(x)
    task.check(output, y)
    if task.reads_text:
        check_dependence(model, x)


def check_dependence(model: nn.Module, x: Tensor) -> None:
    """Raise `SettingError` if outputs of a language model depend on what they must not depend on.

    The first and the last text are exchanged for another one: outputs of the others must stay. Then
    the second half of each text is exchanged: outputs in the first half must stay. They are
    compared up to what solves leave open, and where equilibria were found, so that a weak
    dependence is not noticed.

    Args:
        model: The model, which is left in its mode.
        x: Texts, (batch, length), at least two that differ; of fewer, nothing is known.
    """
    probe = _Probe(model)
    try:
        with (
            evaluation_mode(model),
            torch.no_grad(),
            warnings.catch_warnings(),
            torch.random.fork_rng(),
        ):
            warnings.simplefilter("ignore")  # solves that end early are told elsewhere
            _check_samples(probe, x)
            _check_causal(probe, x)
    except ConvergenceError:
        return  # outputs that were not found say nothing


class _Probe:
    """A model's outputs, and which of them come from equilibria that were found."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.name = str(getattr(model, "name", type(model).__name__))
        self.solves = SolveMonitor(model)
        tolerances = [layer.stop.tolerance for layer in self.solves.layers]
        self.least = max([MIN_CHANGE, *tolerances])

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)  # a model may draw numbers in evaluation, too
        self.solves.clear()
        with self.solves.listening():
            output: Tensor = self.model(x)
        return output.double().cpu(), ~self.solves.missed(len(x))

    def depends(self, change: Tensor, own: Tensor, output: Tensor) -> bool:
        """Whether a change is more than the solves leave open; NaN compares as not more."""
        if not change.numel() or not own.numel():
            return False
        least = torch.maximum(MIN_FRACTION * own.max(), self.least * output.abs().max())
        return bool(change.max() > least)


def _check_samples(probe: _Probe, x: Tensor) -> None:
    output, found = probe(x)
    for place, other in ((0, len(x) - 1), (len(x) - 1, 0)):
        if torch.equal(x[place], x[other]):
            continue
        changed = x.clone()
        changed[place] = x[other]
        again, found_again = probe(changed)
        change = (again - output).abs().flatten(1).amax(1)
        rest = found & found_again & (torch.arange(len(x)) != place)
        if probe.depends(change[rest], change[place], output):
            raise SettingError(
                f"The output of model {probe.name!r} for a sample",
                "not depend on the other samples of its batch",
                None,
                "The first dimension of all that it is given and returns is the batch, which no "
                "layer may mix or take for time (torch's recurrent layers and attention need "
                "batch_first=True).",
                got="another output beside other samples",
            )


def _check_causal(probe: _Probe, x: Tensor) -> None:
    half = x.shape[1] // 2
    changed = x.clone()
    changed[:, half:] = x.roll(1, 0)[:, half:]
    if not half or torch.equal(changed, x):
        return
    (output, found), (again, found_again) = probe(x), probe(changed)
    change = (again - output).abs()[found & found_again]
    if probe.depends(change[:, :half], change[:, half:], output):
        raise SettingError(
            f"The output of model {probe.name!r} at a token",
            "not depend on later tokens, which it is to predict",
            None,
            "Make its layers causal: a mask in attention, padding on the left in convolutions, one "
            "direction in recurrent layers.",
            got="another output before other tokens",
        )
