"""Scores after epochs, and the weights that are kept by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from equipoise.data import Dataset
from equipoise.engine.evaluate import Evaluation
from equipoise.engine.run_folder import RunFolder
from equipoise.engine.settings import TrainConfig
from equipoise.engine.tasks import Metric

__all__ = ["Scorer"]

Evaluate = Callable[[Dataset], Evaluation]


class Scorer:
    """Scores a model after epochs, and keeps the weights to use.

    With `TrainConfig.evaluate_samples` it scores some of the samples after epochs, always the same,
    and all of them once in the end.

    Args:
        store: The folder of the run and what the run must remember.
        settings: How often to score, and how many samples.
        metric: Which of two models is better.
        dataset: What to score, if anything.
        split: What that is called.
        about: What is known of the training data, to keep with the weights.
    """

    def __init__(
        self,
        store: RunFolder,
        settings: TrainConfig,
        metric: Metric,
        dataset: Dataset | None,
        split: str,
        about: dict[str, Any],
    ) -> None:
        self.store, self.state, self.position = store, store.state, store.state.position
        self.settings, self.metric, self.about = settings, metric, about
        self.dataset, self.split = dataset, split
        count = settings.evaluate_samples
        self.sample: Dataset | None = None  # what is scored after epochs, if not all
        if dataset is not None and 0 < count < len(dataset):
            order = torch.arange(len(dataset))  # a text is read from its beginning
            if not dataset.continuous:
                order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
            self.sample = dataset.select_rows(order[:count].sort().values)

    def is_due(self, epoch: int) -> bool:
        """Return whether an epoch ends with an evaluation.

        Args:
            epoch: Which, counted from 0.
        """
        return self.dataset is not None and (epoch + 1) % self.settings.evaluate_every == 0

    def samples_left(self, epochs: int) -> int:
        """Return how many samples are scored from now to the end of a run.

        Args:
            epochs: Its length.
        """
        if self.dataset is None:
            return 0
        every = self.settings.evaluate_every
        after = epochs // every - self.position.epoch // every
        if self.settings.patience and epochs % every:
            after += 1  # the last epoch, before the best one is chosen
        unscored = epochs % every and not self.settings.patience
        last = len(self.dataset) if self.sample is not None or unscored else 0
        return after * len(self.dataset if self.sample is None else self.sample) + last

    def end_epoch(self, evaluate: Evaluate) -> dict[str, Any]:
        """Score the present weights if that is due, and keep them unless only the best are kept.

        Args:
            evaluate: Scores a data set with the present weights.

        Returns:
            The scores by the name of the split; empty if it was not due.
        """
        position, scores, better = self.position, None, False
        if self.dataset is not None and self.is_due(position.epoch):
            scores = evaluate(self.dataset if self.sample is None else self.sample)
            score, higher = scores.metrics[self.metric.name], self.metric.higher_is_better
            better = position.judge(score, higher=higher)
            position.rank(score, higher=higher, keep=self.settings.checkpoint_best)
        if better or not self.settings.patience or not self.state.kept:
            self._remember(scores)
            position.kept_epoch, position.kept_step = position.epoch + 1, position.step
            if self.settings.patience:
                self.state.keep()
            self._write()
        return {self.split: scores.to_dict()} if scores else {}

    def score_last(self, evaluate: Evaluate) -> None:
        """Score the weights of the last epoch, if only the best are kept and that was not due.

        No checkpoint knows of it, so that a run that is resumed with more epochs has the bits of
        one that had them from the start.

        Args:
            evaluate: Scores a data set with the present weights.
        """
        position, last = self.position, self.position.epoch - 1
        if not self.settings.patience or self.dataset is None or last < 0 or self.is_due(last):
            return
        scores = evaluate(self.dataset if self.sample is None else self.sample)
        score = scores.metrics[self.metric.name]
        if position.judge(score, higher=self.metric.higher_is_better):
            self._remember(scores)
            position.kept_epoch, position.kept_step = position.epoch, position.step
            self.state.keep()

    def finish(self, evaluate: Evaluate) -> None:
        """Score the weights that are kept on all samples, where that was not done after an epoch.

        Args:
            evaluate: Scores a data set with those weights.
        """
        if self.dataset is not None and (self.sample is not None or not self.position.test):
            self._remember(evaluate(self.dataset))
        if self.settings.patience:
            self._write()

    def _write(self) -> None:
        """Write the present weights as those to use."""
        about = {
            "epoch": self.position.kept_epoch,
            "step": self.position.kept_step,
            self.split: self.position.test,
            "data": self.about,
        }
        self.store.write_weights(self.state.model.state_dict(), about)

    def _remember(self, scores: Evaluation | None) -> None:
        """Note the scores of the weights that are kept."""
        confusion = scores.confusion if scores else None
        self.position.test = scores.to_dict() if scores else {}
        self.position.confusion = None if confusion is None else confusion.tolist()
