"""How long a run is, and which samples each of its steps learns from."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from equipoise.data import Dataset, Loading, Transform, batch_count, batch_positions, batches
from equipoise.engine.distributed import Group
from equipoise.engine.run_state import RunProgress
from equipoise.engine.settings import TrainConfig

__all__ = ["Course"]


class Course:
    """The steps of a run.

    Args:
        train: The samples to learn from.
        settings: How the run goes.
        group: The processes that train together.
        transform: What is done to each batch.
        loading: How samples are loaded.
        continuous: Whether each row of a batch goes on where the last batch ended, as a model with
            a memory needs it.

    Attributes:
        local_batch: Samples of this process in each step.
        steps_per_epoch: Steps of a whole epoch.
        steps: Steps of the run.
        epochs: Its epochs, the last of which may be shorter.
    """

    def __init__(
        self,
        train: Dataset,
        settings: TrainConfig,
        group: Group,
        *,
        transform: Transform | None = None,
        loading: Loading | None = None,
        continuous: bool = False,
    ) -> None:
        self._train, self._settings, self._group = train, settings, group
        self._transform, self._loading, self._continuous = transform, loading, continuous
        self.local_batch = settings.batch // group.world
        self.steps_per_epoch = batch_count(
            train, self.local_batch, rank=group.rank, world=group.world, continuous=continuous
        )
        self.steps = settings.steps or self.steps_per_epoch * settings.epochs
        self.epochs = -(-self.steps // self.steps_per_epoch)

    def batches(self, position: RunProgress) -> Generator[tuple[Tensor, Tensor]]:
        """Return the batches of the present epoch that are not learnt from yet.

        Args:
            position: How far the run is.
        """
        ahead = self._ahead(position)
        return batches(
            self._train,
            self.local_batch,
            self._settings.seed,
            position.epoch,
            transform=self._transform,
            rank=self._group.rank,
            world=self._group.world,
            start=ahead.start,
            stop=ahead.stop,
            continuous=self._continuous,
            loading=self._loading,
        )

    def rows(self, position: RunProgress) -> list[Tensor]:
        """Return where in the data the samples of `batches` are.

        Args:
            position: How far the run is.
        """
        ahead = self._ahead(position)
        return batch_positions(
            self._train,
            self.local_batch,
            self._settings.seed,
            position.epoch,
            rank=self._group.rank,
            world=self._group.world,
            continuous=self._continuous,
        )[ahead.start : ahead.stop]

    def _ahead(self, position: RunProgress) -> range:
        """The numbers of the batches of the present epoch that are not learnt from yet."""
        # More processes may leave out the last, short batch.
        start = min(position.batch, self.steps_per_epoch)
        left = self.steps - position.step if self._settings.steps else self.steps_per_epoch
        return range(start, start + left)

    def is_over(self, position: RunProgress) -> bool:
        """Return whether all epochs are over, or all steps and the epoch of the last one.

        Args:
            position: How far the run is.
        """
        if self._settings.steps:
            return position.step >= self.steps and not position.batch
        return position.epoch >= self._settings.epochs
