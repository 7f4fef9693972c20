"""How a layer solves: the settings that it keeps, and those of one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, get_args

import torch

from equipoise.core.registry import choose
from equipoise.core.validate import SettingError, require_type
from equipoise.gradients.base import GRADIENTS, Gradient
from equipoise.solvers.policy import OnFailure
from equipoise.solvers.protocol import SOLVERS, Solver, Stop

__all__ = ["CallOptions", "Settings", "SolveOptions", "resolve_options"]


class CallOptions(TypedDict, total=False):
    """How one equilibrium is found and differentiated: what can be set for a single call.

    Attributes:
        solver: A solver, its name, or a table such as `{ name = "anderson", memory = 3 }`; `auto`
            picks from what the cell declares.
        gradient: A gradient strategy, its name, or a table: `implicit`, `unrolled`, ...
        tolerance: Relative residual to reach, in the forward and the adjoint solve.
        max_steps: Updates at most, likewise.
        on_failure: What to do when samples do not converge: `raise`, `warn` or `ignore`.
        stop: The stopping rule in full, in place of `tolerance` and `max_steps`.
    """

    solver: str | Mapping[str, Any] | Solver
    gradient: str | Mapping[str, Any] | Gradient
    tolerance: float
    max_steps: int
    on_failure: OnFailure
    stop: Stop | None


class SolveOptions(CallOptions, total=False):
    """All arguments of `Equilibrium` but its cell.

    Layers and models take them as `**solve: Unpack[SolveOptions]` and hand them on.

    Attributes:
        eval_options: Options that differ while the layer is in evaluation mode.
    """

    eval_options: CallOptions | None


class Settings(NamedTuple):
    """Options with their names looked up.

    Attributes:
        solver: The forward solver; None picks one from what the cell declares.
        gradient: The gradient strategy.
        stop: The stopping rule.
        on_failure: What to do when samples do not converge.
        states_gradient: The gradient strategy of iterates that are returned; None is `gradient`.
    """

    solver: Solver | None
    gradient: Gradient
    stop: Stop
    on_failure: OnFailure
    states_gradient: Gradient | None = None

    def lower_precision(self, device: str) -> torch.dtype | None:
        """Return the precision, lower than float32, that solves may run in under autocast, if any.

        It must allow the tolerances: twice bfloat16's precision is about what a residual can reach.
        A tolerance on the error asks for proofs, which rounding would spoil, and small adjoints
        vanish in float16.

        Args:
            device: The type of device.
        """
        lower = torch.get_autocast_dtype(device)
        if lower != torch.bfloat16 or self.stop.tolerance_on == "error":
            return None
        own = [g.tolerance for g in (self.gradient, self.states_gradient) if g is not None]
        tolerances = [self.stop.tolerance, *(each for each in own if each is not None)]
        return lower if min(tolerances) >= 2 * torch.finfo(lower).eps else None

    def refined(self, owner: str, options: Mapping[str, Any]) -> Settings:
        """Return the settings with some options changed.

        A `tolerance` or `max_steps` changes that number of the stopping rule alone.
        """
        chosen = resolve_options(owner, options)
        stop = chosen.get("stop") or self.stop
        numbers = {name: chosen[name] for name in ("tolerance", "max_steps") if name in chosen}
        solver = chosen.get("solver", self.solver)
        return Settings(
            None if solver == "auto" else solver,
            chosen.get("gradient", self.gradient),
            replace(stop, **numbers) if numbers else stop,
            chosen.get("on_failure", self.on_failure),
        )


def resolve_options(owner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with their names looked up; raise unless each is one and can be used."""
    require_type(owner, options, Mapping, "a dictionary of options")
    chosen = dict(options)
    for name in chosen:
        choose(owner, name, CallOptions.__annotations__, "have only the options")
    if chosen.get("stop") is None:
        chosen.pop("stop", None)
    else:
        require_type(f"{owner} stop", chosen["stop"], Stop, "a Stop")
        if "tolerance" in chosen or "max_steps" in chosen:
            raise SettingError(
                f"{owner} stop",
                "be given without tolerance and max_steps, which it contains",
                chosen,
                got="both",
            )
    for name in ("tolerance", "max_steps"):
        if name in chosen:
            Stop(**{name: chosen[name]})  # raises if it is no such number
    if chosen.get("solver", "auto") != "auto":
        chosen["solver"] = SOLVERS.resolve(chosen["solver"], also=["auto"])
    if "gradient" in chosen:
        chosen["gradient"] = GRADIENTS.resolve(chosen["gradient"])
    if "on_failure" in chosen:
        choose("on_failure", chosen["on_failure"], get_args(OnFailure))
    return chosen
