from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.analysis import objective
from equipoise.families.opteq import OptEq
from equipoise.plots import plot_objective
from equipoise.prox.regularizer import Custom


def solved(batch: int = 6, **more) -> tuple[OptEq, torch.Tensor]:
    layer = OptEq(
        8,
        12,
        more.pop("hidden", 16),
        "tanh",
        solver="fixed_point",
        max_steps=200,
        tolerance=1e-6,
        **more,
    )
    x = torch.randn(batch, 8)
    layer(x, trace=True)
    return layer, x


def test_plot_shows_every_sample_and_the_medians(tmp_path: Path) -> None:
    layer, x = solved()
    problem, trace = objective(layer, x), layer.last.trace
    figure = plot_objective(problem, trace, tmp_path / "solve.png")
    assert (tmp_path / "solve.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    assert (len(left.lines), len(right.lines)) == (2 * 7, 7)
    assert left.get_yscale() == right.get_yscale() == "log"
    assert figure.get_suptitle() == problem.title.replace("phi", "φ")
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "objective at f(z), above its minimum, median",
        "merit function at z, above its minimum, median",
    ]
    middle = right.lines[-1].get_ydata()
    assert middle == pytest.approx(np.median(trace.residual.numpy(), axis=1))
    for median in (left.lines[6], left.lines[13]):
        values = median.get_ydata()
        assert (np.diff(values[np.isfinite(values)]) <= 0).all()  # plain iteration goes down
        assert values[0] > 0


def test_plot_of_one_sample_has_no_median() -> None:
    layer, x = solved(batch=1)
    figure = plot_objective(objective(layer, x), layer.last.trace)
    assert [len(axes.lines) for axes in figure.axes] == [2, 1]
    assert "median" not in figure.axes[0].get_legend().get_texts()[0].get_text()


def test_plot_of_a_regularised_layer_and_of_a_coupled_one() -> None:
    centre = Custom(lambda z: z.mean(dim=0).square().sum(), coupled=True, convex=True)
    for regularizer, lines in (("l1", 14), (centre, 2)):
        layer, x = solved(regularizer=regularizer, strength=0.01)
        figure = plot_objective(objective(layer, x), layer.last.trace)
        assert len(figure.axes[0].lines) == lines


def test_plot_refuses_what_it_cannot_draw() -> None:
    layer, x = solved(hidden=[5, 6])
    with pytest.raises(
        ValueError,
        match=(
            r"must be a problem with a function that the equilibrium minimises; "
            r"got DeepObjective\.$"
        ),
    ):
        plot_objective(objective(layer, x), layer.last.trace)
    layer, x = solved()
    with pytest.raises(ValueError, match=r"Call layer\(x, trace=True\) first"):
        plot_objective(objective(layer, x), None)
