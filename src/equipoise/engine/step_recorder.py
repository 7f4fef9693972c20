"""What is counted, shown and logged of each step."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.core import RepeatedNotes
from equipoise.engine.blow_up import BlowUp, largest_magnitude
from equipoise.engine.progress import Progress
from equipoise.engine.step import Step, Stepper, Verdict
from equipoise.engine.totals import Totals

__all__ = ["StepRecorder"]


class StepRecorder:
    """Counts the steps of a run, shows them, and makes their lines of metrics.

    Args:
        stepper: Makes the steps.
        progress: Where they are shown.
        notes: Where it is told that some were skipped.
    """

    def __init__(self, stepper: Stepper, progress: Progress, notes: RepeatedNotes) -> None:
        self.stepper, self.progress, self.notes = stepper, progress, notes
        self.state, self.position = stepper.state, stepper.state.position
        self.task, self.settings = stepper.task, stepper.settings
        self.group, self.solves = stepper.group, stepper.solves
        self.blow_up = BlowUp()

    def record(self, step: Step, verdict: Verdict) -> dict[str, Any] | None:
        """Count a step and show it; return its line of metrics if one is due.

        Args:
            step: What it computed.
            verdict: What became of it.
        """
        position, group, skipped = self.position, self.group, verdict is not Verdict.APPLY
        totals, score = Totals(self.task), self.task.score()
        if not skipped:
            score.update(step.output.detach(), step.target)
        totals.add(step.loss.item(), 0.0 if skipped else step.weight, self.solves)
        totals.add_score(score)
        totals.load(group.sum(totals.vector))
        self.state.epoch.load(self.state.epoch.vector + totals.vector)
        position.count_step(skipped=skipped, serious=verdict is Verdict.SKIP)
        line = totals.line()
        if not skipped:
            if position.first_loss is None:
                position.first_loss = line["loss"]
            largest = max(self.solves.largest, largest_magnitude(step.output))
            if group.is_main:
                self.blow_up.look(position.step, line["loss"], position.first_loss, largest)
        self.progress.step(
            position.step,
            position.epoch,
            {**line, "skipped": position.skipped, "failed": self.state.epoch.failed},
        )
        if skipped and position.skipped_in_a_row <= 1:
            self.notes.note(f"step {position.step} was skipped: {self.stepper.skip_reason}")
        if not skipped and position.step % self.settings.log_every and position.step != 1:
            return None
        residuals = (self.solves.forward.residual, self.solves.backward.residual)
        forward, backward = (
            group.max(residual) if self.solves.layers else None for residual in residuals
        )
        return {
            "kind": "step",
            "step": position.step,
            "epoch": position.epoch,
            **line,
            "learning_rate": step.learning_rate,
            "gradient_norm": step.gradient_norm.item(),
            **self._terms(step),
            "forward_residual": forward,
            "backward_residual": backward,
            "skipped": skipped,
        }

    def _terms(self, step: Step) -> dict[str, float]:
        """What was added to the loss, in the mean over all processes, and missed solves for it."""
        found: dict[str, float] = {}
        for term in self.stepper.terms:
            own = [step.weight * step.terms[term.name].item(), step.weight, term.missed]
            total, weight, missed = self.group.sum(torch.tensor(own, dtype=torch.float64)).tolist()
            found[term.name] = total / (weight or 1.0)
            if missed:
                found[f"{term.name}_missed"] = int(missed)
        return found
