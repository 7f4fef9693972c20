"""One step of training: compute it, judge whether it is sound, then apply or undo it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equipoise.engine.distributed import Group
from equipoise.engine.loss_term import LossTerm
from equipoise.engine.precision import autocast
from equipoise.engine.run_state import RunState
from equipoise.engine.settings import TrainConfig
from equipoise.engine.solve_monitor import SolveMonitor
from equipoise.engine.tasks import Task

__all__ = ["Step", "Stepper", "Verdict", "part_size"]

SLOWER = "lower optimizer.learning_rate or set train.clip"


class Verdict(IntEnum):
    """What becomes of a step; the processes of a group agree on the largest."""

    APPLY = 0
    RESCALE = 1  # skipped, because the gradient overflowed float16 while its scale is searched for
    SKIP = 2  # skipped, because a solve failed or something is not finite


@dataclass(frozen=True)
class Step:
    """What one step computed, before it is known whether it counts.

    Attributes:
        output: What the model returned.
        target: What it should have been.
        loss: The mean loss.
        weight: How many things that is the mean of.
        learning_rate: Of this step.
        gradient_norm: Of all weights together.
        buffers: What the model's buffers held before.
        terms: What the terms that were added to the loss estimate, by name.
    """

    output: Tensor
    target: Tensor
    loss: Tensor
    weight: float
    learning_rate: float
    gradient_norm: Tensor
    buffers: list[Tensor]
    terms: dict[str, Tensor] = field(default_factory=dict)


class Stepper:
    """Makes the steps of a run.

    Args:
        state: The model, its optimiser, and what else a step changes.
        task: What the model is trained for.
        settings: How the run goes.
        group: The processes that step together.
        solves: Listens to the equilibrium layers of the model.
        terms: What is added to the loss.

    Attributes:
        wrapped: The model, such that its gradients are averaged over the processes.
        skip_reason: Why the last step was skipped, if it was.
    """

    def __init__(
        self,
        state: RunState,
        task: Task,
        settings: TrainConfig,
        group: Group,
        solves: SolveMonitor,
        terms: Sequence[LossTerm] = (),
    ) -> None:
        self.terms = tuple(terms)
        self.state, self.model, self.optimizer = state, state.model, state.optimizer
        self.task, self.settings, self.group, self.solves = task, settings, group, solves
        self.wrapped = state.model
        self.skip_reason = ""

    def compute(
        self,
        x: Tensor,
        y: Tensor,
        learning_rate: float,
        rows: Tensor | None = None,
        *,
        whole: Tensor | None = None,
    ) -> Step:
        """Compute the loss of a batch and its gradients, in parts if so set.

        Args:
            x: The samples.
            y: Their targets.
            learning_rate: Of the step.
            rows: Where in the data the samples are; needed for warm starts.
            whole: The samples as the terms of the loss see them, if images of another size.
        """
        for each in self.optimizer.param_groups:
            each["lr"] = learning_rate * each["rate"]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        if not self.model.training:  # else a part that is frozen in evaluation mode would thaw
            self.model.train()
        self.solves.clear()
        for term in self.terms:
            term.failure, term.missed = "", 0
        self.optimizer.zero_grad()
        parts = self._split(x, y)
        places = [None] * len(parts) if rows is None else rows.tensor_split(len(parts))
        seen = (x if whole is None else whole).tensor_split(len(parts))
        weights = [self.task.weight(target) for _, target in parts]
        weight, count = sum(weights), len(x)
        # Gradients are averaged over processes: where these have different weights, each loss
        # counts by its own. Those of the parts add up.
        both = torch.tensor([weight, count], dtype=torch.float64)
        total_weight, total_count = self.group.sum(both).tolist()
        outputs, losses = [], []
        estimates: dict[str, list[Tensor]] = {term.name: [] for term in self.terms}
        together = zip(parts, seen, places, weights, strict=True)
        for number, ((inputs, target), samples, place, own) in enumerate(together, 1):
            factor = own * self.group.world / total_weight if total_weight else 1.0
            sample_factor = len(inputs) * self.group.world / total_count
            # Processes exchange gradients once, with the last part.
            exchange = nullcontext() if number == len(parts) else self._unsynchronized()
            with exchange, self._starts(place):
                with autocast(self.group.device, self.settings.precision), ExitStack() as stack:
                    for term in self.terms:
                        stack.enter_context(term.watching(samples))
                    output = self.state.memory.run(self.wrapped, inputs)
                self.task.check(output, target)
                loss = self.task.loss(output, target)
                total = loss if factor == 1 else loss * factor
                for term in self.terms:
                    estimate = term.estimate(partial(self.task.loss, target=target), output)
                    estimates[term.name].append(estimate.detach().cpu())
                    counts = sample_factor if term.over_samples else factor
                    total = total + term.weight * counts * estimate
                scaled = self.state.scaler.scale(total)
                scaled.backward()  # type: ignore[no-untyped-call]
            outputs.append(output.detach())
            losses.append(loss.detach())
        loss, output = losses[0], outputs[0]
        if len(parts) > 1:
            sums = [each * own for each, own in zip(losses, weights, strict=True)]
            loss, output = torch.stack(sums).sum() / (weight or 1.0), torch.cat(outputs)
        self.state.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm(
            [each.grad for each in self.model.parameters() if each.grad is not None]
        )
        by_weight = torch.tensor([own / (weight or 1.0) for own in weights])
        by_count = torch.tensor([len(inputs) / count for inputs, _ in parts])
        terms = {
            term.name: (
                torch.stack(estimates[term.name]) * (by_count if term.over_samples else by_weight)
            ).sum()
            for term in self.terms
        }
        return Step(output, y, loss, weight, learning_rate, norm, buffers, terms)

    def _split(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The parts of a batch, of nearly the same size, that are computed one after another."""
        most = part_size(self.settings.batch // self.group.world, self.settings.accumulate)
        count = -(-len(x) // most)
        return list(zip(x.tensor_split(count), y.tensor_split(count), strict=True))

    def _starts(self, rows: Tensor | None) -> AbstractContextManager[None]:
        """Where solves start from what is kept of the samples, if anything is."""
        warm = self.state.warm
        return nullcontext() if warm is None or rows is None else warm.batch(rows)

    def _unsynchronized(self) -> AbstractContextManager[None]:
        """Where gradients are added up in this process and not yet averaged over all of them."""
        if isinstance(self.wrapped, DistributedDataParallel):
            return self.wrapped.no_sync()
        return nullcontext()

    def verdict(self, step: Step) -> Verdict:
        """Return what all processes do with a step, and keep the reason if it is skipped."""
        own, self.skip_reason = self._judge(step)
        verdict = Verdict(int(self.group.max(float(own))))
        if verdict is not Verdict.APPLY and not self.skip_reason:
            self.skip_reason = "another process skipped it."
        return verdict

    def apply(self, step: Step, verdict: Verdict) -> None:
        """Let the optimiser step, or leave everything as it was before the step, bit for bit."""
        if verdict is Verdict.APPLY:
            clip = self.settings.clip
            if clip:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, step.gradient_norm)
            self.state.scaler.step(self.optimizer)
            if self.state.average:
                self.state.average.update()
            if self.state.warm:
                self.state.warm.commit()
            self.state.memory.advance()
        else:
            # What is remembered is not the text before the next batch any more.
            self.state.memory.forget()
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), step.buffers, strict=True):
                    buffer.copy_(before)
            self.optimizer.zero_grad()
            if self.state.warm:
                self.state.warm.forget()
        if self.state.scaler.is_enabled():
            self.state.scaler.update()

    def _judge(self, step: Step) -> tuple[Verdict, str]:
        """Return what this process would do with a step, and why it would skip it."""
        failed_term = next((term.failure for term in self.terms if term.failure), "")
        finite_loss = bool(torch.isfinite(step.loss))
        finite_gradient = bool(torch.isfinite(step.gradient_norm))
        scaled = self.state.scaler.is_enabled() and self.state.scaler.get_scale() > 1
        computed = finite_loss and not self.solves.forward_failed and not failed_term
        if computed and not finite_gradient and scaled:
            return Verdict.RESCALE, "the gradient overflowed float16; its scale was halved."
        # What a term did wrong makes backward solves fail, and not the other way round.
        if self.solves.failure and (self.solves.forward_failed or not failed_term):
            return Verdict.SKIP, self.solves.failure
        if failed_term:
            return Verdict.SKIP, failed_term
        if not finite_loss:
            reason = f"the loss was {step.loss.item()}; {SLOWER}, and look for NaN in the data."
            return Verdict.SKIP, reason
        if not finite_gradient:
            low = self.settings.precision != "float32"
            remedy = f"{SLOWER}, or set train.precision=float32" if low else SLOWER
            return Verdict.SKIP, f"the gradient was not finite; {remedy}."
        return Verdict.APPLY, ""


def part_size(batch: int, accumulate: int) -> int:
    """Return how many samples the parts of a batch have at most.

    Args:
        batch: Samples of this process in each step.
        accumulate: In how many parts they are computed.
    """
    return -(-batch // accumulate)
