"""The names of the levels of a landscape."""

import numpy as np

from equipoise.plots.landscape import label_levels


def test_levels_that_lie_close_have_different_labels() -> None:
    assert label_levels(np.array([0.07, 0.7, 28.0, 4000.0])) == ["0.07", "0.7", "28", "4000"]
    assert label_levels(np.array([2.30, 2.31, 2.32])) == ["2.3", "2.31", "2.32"]
