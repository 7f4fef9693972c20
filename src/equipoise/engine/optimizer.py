"""Optimisers by name, and a running average of the weights that they make."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from equipoise.core import SettingError
from equipoise.engine.muon import Muon, hidden_matrices
from equipoise.engine.settings import OptimizerConfig

__all__ = ["Average", "make_optimizer", "parameter_rates"]

_KERNELS = (nn.Conv1d, nn.ConvTranspose1d, ParametrizationList)
"""What may have kernels, or their lengths, of shape `(channels, 1, 1)`."""


def make_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Return an optimiser of all weights of a model that are trained.

    Args:
        model: Whose weights.
        settings: Which optimiser.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not trained:
        raise ValueError(
            f"Trainer.model must have weights to train; got none in {type(model).__name__}."
        )
    rates = parameter_rates(trained, settings.rates)
    matrices = hidden_matrices(model) if settings.name == "muon" else set()
    spared = set() if settings.decay_all else _biases_and_scales(model)
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, weight in trained.items():
        key = (name not in spared, rates[name], name in matrices)
        groups.setdefault(key, []).append(weight)
    made = [
        # `rate` is the factor of the schedule's learning rate, which is set before each step.
        {
            "params": weights,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "rate": rate,
            "lr": settings.learning_rate * rate,
        }
        | ({"orthogonal": True} if orthogonal else {})
        for (decayed, rate, orthogonal), weights in sorted(
            groups.items(), key=lambda each: not each[0][0]
        )
    ]
    if settings.name == "muon":
        return Muon(
            made, settings.learning_rate, settings.momentum, settings.betas, settings.epsilon
        )
    if settings.name == "sgd":
        return torch.optim.SGD(
            made, settings.learning_rate, settings.momentum, nesterov=settings.nesterov
        )
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(made, settings.learning_rate, settings.betas, settings.epsilon)


def _biases_and_scales(model: nn.Module) -> set[str]:
    """Return the names of the parameters that do not decay: they only move or scale values.

    They have one dimension or, as one number for each channel of an image, the shape
    `(channels, 1, 1)`, are called a bias, or belong to a normalisation. The lengths of kernels,
    which weight normalisation trains apart, decay as kernels do.
    """
    found = set[str]()
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(prefix, recurse=False):
            channels = weight.dim() == 3 and weight.shape[1:] == (1, 1)
            if (
                weight.dim() < 2
                or (channels and not isinstance(module, _KERNELS))
                or _is_bias(name)
                or isinstance(module, nn.LayerNorm | nn.RMSNorm)
            ):
                found.add(name)
    return found


def _is_bias(name: str) -> bool:
    """Whether a parameter is called a bias; one of a list or parametrized may be, too."""
    words = name.split(".")
    while words and (words[-1].isdigit() or words[-1].startswith("original")):
        words.pop()
    return bool(words) and words[-1].split("_")[0] in ("bias", "biases")


def parameter_rates(names: Iterable[str], rates: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of the learning rate for each parameter.

    A pattern matches a parameter if its words, which dots separate, are found among those of the
    parameter's name, in this order: `equilibrium.operators` matches
    `equilibrium.cell.operators.0.kernel`, and `bias` every bias. In a word, `*`, `?` and `[...]`
    mean what they mean to a shell. Where several patterns match, their factors multiply.

    Args:
        names: Names of parameters.
        rates: Factors by pattern.
    """
    found = dict.fromkeys(names, 1.0)
    for pattern, rate in rates.items():
        matched = [name for name in found if _matches(pattern, name)]
        if not matched:
            raise SettingError(
                "optimizer.rates",
                "name parameters that are trained",
                rates,
                _hint(pattern, list(found)),
                got=f"{pattern!r}, which matches none",
            )
        for name in matched:
            found[name] *= rate
    return found


def _matches(pattern: str, name: str) -> bool:
    """Whether the words of a pattern are found in a name, in their order."""
    words = iter(name.split("."))
    return all(any(fnmatchcase(word, own) for word in words) for own in pattern.split("."))


def _hint(pattern: str, names: list[str]) -> str:
    """The nearest pattern that matches something, or what names begin with."""
    known = list(dict.fromkeys(word for name in names for word in name.split(".")))
    near = [difflib.get_close_matches(word, known, n=1) or [word] for word in pattern.split(".")]
    guess = ".".join(each for (each,) in near)
    if any(_matches(guess, name) for name in names):
        return f"Did you mean {guess!r}?"
    begin = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    return f"Their names begin with {begin}."


class Average:
    """The exponential average `a <- decay a + (1 - decay) w` of a model's weights.

    The model is evaluated with it. Buffers of floats, such as the statistics of batch
    normalisation, are averaged like weights, since they belong to them. Early on the decay is
    `(1 + n)/(10 + n)` after n updates where that is less, so that the first weights are soon
    forgotten.

    Args:
        model: Whose weights.
        decay: `decay`, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.updates = 0
        self.values = {name: value.clone() for name, value in self._present().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present weights."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, value in self._present().items():
            self.values[name].lerp_(value, 1 - decay)

    def load(self, values: Mapping[str, Tensor], updates: int) -> None:
        """Take over averages, or raise `ValueError` if they are those of another model.

        Args:
            values: The averages, by the names of the weights.
            updates: How many updates made them.
        """
        if {name: value.shape for name, value in values.items()} != {
            name: value.shape for name, value in self.values.items()
        }:
            raise ValueError("averages of the weights of another model")
        for name, value in values.items():
            self.values[name].copy_(value)
        self.updates = updates

    @torch.no_grad()
    def apply(self) -> None:
        """Give the model the averages for good."""
        for name, value in self._present().items():
            value.copy_(self.values[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages, and its own weights again afterwards, bit for bit."""
        own = {name: value.clone() for name, value in self._present().items()}
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self._present().items():
                    value.copy_(own[name])

    def _present(self) -> dict[str, Tensor]:
        """The model's own tensors of floats, real and complex."""
        return {
            name: value
            for name, value in self.model.state_dict().items()
            if value.is_floating_point() or value.is_complex()
        }
