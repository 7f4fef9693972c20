"""The loss of the task at iterates of a solve, as part of a training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from equipoise.core import (
    SettingError,
    choose,
    require_count,
    require_fraction,
    require_positive,
    require_type,
)
from equipoise.engine.loss_term import LossTerm
from equipoise.gradients import JacobianFree
from equipoise.models import find_equilibria

__all__ = ["Correction", "CorrectionLoss"]

KEY = "task.correction"


@dataclass(frozen=True)
class Correction:
    """At which iterates of a solve the loss is taken too, and with which weights.

    Args:
        steps: After how many steps of the solver, rising.
        weight: The weight of the last of them in the loss.
        decay: The weight of each, divided by that of the next one, in (0, 1].
    """

    steps: tuple[int, ...]
    weight: float = 0.5
    decay: float = 0.8

    def __post_init__(self) -> None:
        for step in self.steps:
            require_count(f"{KEY}.steps", step)
        if not self.steps or any(first >= second for first, second in pairwise(self.steps)):
            raise SettingError(f"{KEY}.steps", "name steps of the solver, rising", [*self.steps])
        require_positive(f"{KEY}.weight", self.weight)
        require_fraction(f"{KEY}.decay", self.decay)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return the settings in a table, as of a config.

        Args:
            table: Such as `{ steps = [2, 4], weight = 0.5 }`.
        """
        for name in table:
            choose(KEY, name, [each.name for each in fields(cls)], "have only the settings")
        steps = table.get("steps", ())
        if isinstance(steps, str):
            raise SettingError(f"{KEY}.steps", "be a list of steps", steps)
        require_type(f"{KEY}.steps", steps, Sequence, "a list of steps")
        return cls(**{**table, "steps": tuple(steps)})


class CorrectionLoss(LossTerm):
    """`sum_i decay^(n - i) L(z_i)`: the loss at `n` iterates of a solve (Bai et al., 2022).

    With it a model learns to have a small loss before its solves are over, so that truncated solves
    do less harm. `L(z_i)` is the task's loss where the model goes on from `f(z_i, x)` in place of
    the equilibrium. The gradient is that of this one step, with `z_i` held fixed (`JacobianFree`),
    as in the paper's code. A sample whose solve is over stays where it ended.

    What a model computes before its equilibrium layer is computed once. Buffers, such as the
    averages of batch normalisation, are changed by the pass with the equilibrium alone.

    Args:
        model: The model, with one equilibrium layer, which it calls once in each pass.
        settings: Which iterates.
    """

    name = "correction_loss"
    over_samples = False

    def __init__(self, model: nn.Module, settings: Correction) -> None:
        self.weight, self._settings, self._model = settings.weight, settings, model
        layers = find_equilibria(model)
        if len(layers) != 1:
            count = len(layers)
            which = f"with {count} equilibrium layers" if count else "without equilibrium layers"
            raise SettingError(
                KEY, f"be left out for a model {which}", settings, "It needs exactly one."
            )
        (self._layer,) = layers.values()
        most = self._layer.gradient.step_limit(self._layer.stop)
        if settings.steps[-1] > most:
            rule = f"be at most {most}, the steps of the layer's solves"
            raise SettingError(f"{KEY}.steps", rule, [*settings.steps])
        self._others = _parts_beside(model, self._layer)
        self._outputs: list[Tensor] = []

    @contextmanager
    def watching(self, x: Tensor) -> Iterator[None]:
        """Keep the iterates of the solve, and the model's outputs with each of them."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        states: list[Any] = []
        solve, steps = self._layer.forward, self._settings.steps
        recordings = [_Recording(part.forward) for part in self._others]

        def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls.append((args, named))

        def solve_and_keep(*args: Any, **named: Any) -> Any:
            if states or named.get("states") is not None:
                raise SettingError(
                    KEY,
                    "be left out for a model that solves for its equilibrium more than once in a "
                    "pass, or asks for iterates itself",
                    self._settings,
                )
            value, kept = solve(*args, **named, states=steps, states_gradient=JacobianFree())
            states.extend(kept)
            for recording in recordings:
                recording.close()
            return value

        with ExitStack() as stack:
            hook = self._model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
            for part, recording in zip(self._others, recordings, strict=True):
                stack.enter_context(_forward_replaced(part, recording.record))
            stack.enter_context(_forward_replaced(self._layer, solve_and_keep))
            yield
        if len(calls) != 1 or not states:
            rule = "be left out for a model that does not call its equilibrium layer as a module"
            raise SettingError(KEY, rule, self._settings)
        self._outputs = [self._continue_from(state, calls[0], recordings) for state in states]

    def _continue_from(
        self,
        state: Any,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        recordings: Sequence[_Recording],
    ) -> Tensor:
        """What the model returns with a state in place of the equilibrium."""
        with ExitStack() as stack:
            for part, recording in zip(self._others, recordings, strict=True):
                stack.enter_context(_forward_replaced(part, recording.replay()))
            stack.enter_context(_forward_replaced(self._layer, lambda *_, **__: state))
            stack.enter_context(_own_buffers(self._model))
            found = self._model(*call[0], **call[1])
        # A language model returns its memory too.
        output: Tensor = found if isinstance(found, Tensor) else found[0]
        return output

    def estimate(self, loss: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        decay, outputs = self._settings.decay, self._outputs
        self._outputs = []
        powers = reversed(range(len(outputs)))
        terms = [decay**power * loss(each) for power, each in zip(powers, outputs, strict=True)]
        return torch.stack(terms).sum()


class _Recording:
    """What a part of a model returned before the equilibrium was solved for.

    Args:
        forward: The part's own forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._returned: list[tuple[Any, int | None]] = []
        self._closed = False

    def close(self) -> None:
        """Record no more."""
        self._closed = True

    def record(self, *args: Any, **named: Any) -> Any:
        """Call the part, and keep what it returns."""
        value = self._forward(*args, **named)
        if not self._closed:
            self._returned.append((value, _version(value)))
        return value

    def replay(self) -> Callable[..., Any]:
        """Return what stands in for the part in another pass over the same samples."""
        left = iter(self._returned)

        def forward(*args: Any, **named: Any) -> Any:
            value, version = next(left, (None, None))
            # What was written to since must be computed again.
            known = version is not None and version == _version(value)
            return value if known else self._forward(*args, **named)

        return forward


def _version(value: Any) -> int | None:
    """How often a tensor was written to; None for other values, which are not kept."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _parts_beside(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """The largest parts of a model that do not contain its layer."""
    holders = {part for part in model.modules() if layer in set(part.modules())}
    found: dict[nn.Module, None] = {}
    pending = [model] if model is not layer else []
    while pending:
        for part in pending.pop().children():
            if part is layer:
                continue
            if part in holders or isinstance(part, nn.ModuleList | nn.ModuleDict):
                pending.append(part)  # lists are not called themselves
            else:
                found[part] = None
    return [*found]


@contextmanager
def _forward_replaced(part: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else while the context lasts."""
    own = vars(part).get("forward")
    vars(part)["forward"] = forward
    try:
        yield
    finally:
        del vars(part)["forward"]
        if own is not None:
            vars(part)["forward"] = own


@contextmanager
def _own_buffers(model: nn.Module) -> Iterator[None]:
    """Let a model write to copies of its buffers while the context lasts.

    Writing back would not do: backward may need them as they were when they were read.
    """
    held = [
        (part, name, buffer)
        for part in model.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        for part, name, buffer in held:
            part._buffers[name] = buffer.clone()
        yield
    finally:
        for part, name, buffer in held:
            part._buffers[name] = buffer
