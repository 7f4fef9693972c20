"""Landscapes, sharpness and trajectories, each against an independent witness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium
from equipoise.analysis import (
    Landscape,
    PointLoss,
    find_basin,
    grid_axis,
    hessian_product,
    jacobian_eigenvalues,
    loss_landscape,
    path_plane,
    project_paths,
    random_direction,
    top_eigenvalues,
    trace_solve,
    weights_of,
)
from equipoise.analysis.direction import moved_weights
from equipoise.core import ConvergenceWarning
from equipoise.core.validate import SettingError


class Tanh(Cell):
    def __init__(self, width: int, radius: float = 0.6) -> None:
        super().__init__()
        self.W = nn.Parameter(radius * torch.linalg.qr(torch.randn(width, width)).Q)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + context)


def test_random_direction_has_the_length_of_each_filter_and_leaves_vectors_alone():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))
    weights = weights_of(model)
    drawn = random_direction(weights)
    for name, weight in weights.items():
        if weight.dim() == 1:
            assert not drawn[name].any()
        else:
            assert torch.allclose(drawn[name].flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
    layer = random_direction(weights, normalize="layer", vectors=True)
    for name, weight in weights.items():
        assert torch.allclose(layer[name].norm(), weight.norm())


def test_path_plane_is_that_of_a_singular_value_decomposition():
    centre = {"a": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    path = [{name: one + torch.randn_like(one) for name, one in centre.items()} for _ in range(5)]
    plane = path_plane(path, centre)
    rows = np.stack(
        [np.concatenate([(one[n] - centre[n]).numpy().ravel() for n in centre]) for one in path]
    )
    values, axes = np.linalg.svd(rows)[1:]
    for k, direction in enumerate(plane.directions):
        flat = np.concatenate([direction[name].numpy().ravel() for name in centre])
        assert abs(flat @ axes[k]) == pytest.approx(1, abs=1e-10)
        assert plane.coordinates[:, k] == pytest.approx(rows @ flat)
    assert plane.explained == pytest.approx(values[:2] ** 2 / (values**2).sum())
    with pytest.raises(SettingError, match="span a plane"):
        path_plane(path[:1], centre)


def test_landscape_of_a_quadratic_is_exact_and_leaves_the_model_alone():
    model = nn.Linear(2, 1, bias=False).double()
    before = weights_of(model)
    directions = [{"weight": torch.eye(2, dtype=torch.float64)[k : k + 1]} for k in (0, 1)]
    x, y = grid_axis(-1, 1, 5), grid_axis(-2, 2, 3)
    assert 0.0 in x

    def measure() -> PointLoss:
        value = float((model.weight.detach() - before["weight"]).square().sum())
        return PointLoss(value if value < 4 else np.inf, int(value > 3), 0)

    found = loss_landscape(model, measure, directions, x, y, samples=1)
    expected = x[None, :] ** 2 + y[:, None] ** 2
    assert found.loss[1] == pytest.approx(expected[1])
    assert np.isnan(found.loss[0]).all()  # infinity is no loss, and is counted
    assert found.undefined == 10
    assert found.unsolved == 10
    assert torch.equal(model.weight, before["weight"])
    with pytest.raises(RuntimeError), moved_weights(model, directions, (1.0, 1.0)):
        raise RuntimeError
    assert torch.equal(model.weight, before["weight"])


def test_basin_is_the_connected_part_around_the_centre():
    x = grid_axis(-2, 2, 41)
    across, up = np.meshgrid(x, x)
    loss = np.minimum(across**2 + 4 * up**2, (across - 2) ** 2 + (up - 2) ** 2 + 0.1)
    nothing = np.zeros(loss.shape, int)
    found = find_basin(Landscape(x, x, loss, nothing, nothing, 1), 1.0)
    assert found.width == pytest.approx(2, rel=0.02)
    assert found.height == pytest.approx(1, rel=0.02)
    assert found.area == pytest.approx(np.pi / 2, rel=0.05)
    assert not found.open
    assert find_basin(Landscape(x, x, loss, nothing, nothing, 1), 5.0).open
    with pytest.raises(SettingError, match="at least"):
        find_basin(Landscape(x, x, loss + 1, nothing, nothing, 1), 0.5)


def test_hessian_products_through_an_equilibrium_are_those_of_a_long_unroll():
    cell = Tanh(3).double()
    head = torch.randn(3, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    layer = Equilibrium(cell, tolerance=1e-12, max_steps=300)
    product = hessian_product(lambda: (layer(x) @ head).square().mean(), [cell.W])

    def unrolled(flat: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(120):
            z = torch.tanh(z @ flat.reshape(3, 3).T + x)
        return (z @ head).square().mean()

    full = torch.autograd.functional.hessian(unrolled, cell.W.detach().reshape(-1))
    found = torch.stack([product(row) for row in torch.eye(9, dtype=torch.float64)])
    assert torch.allclose(found, full, atol=1e-9)
    values = torch.linalg.eigvalsh(full).numpy()
    curvature = top_eigenvalues(product, torch.randn(9, dtype=torch.float64), 3, tolerance=1e-8)
    assert curvature.largest == pytest.approx(values[::-1][:3], abs=1e-7)
    assert curvature.smallest == pytest.approx(values[0], abs=1e-7)


def test_eigenvalues_that_have_not_settled_are_warned_of_and_bounded():
    matrix = torch.diag(torch.linspace(0, 1, 400, dtype=torch.float64))
    start = torch.randn(400, dtype=torch.float64)
    with pytest.warns(ConvergenceWarning, match="raise max_products"):
        found = top_eigenvalues(lambda v: matrix @ v, start, 2, tolerance=1e-9, max_products=8)
    gaps = np.abs(matrix.diagonal().numpy()[None] - found.largest[:, None]).min(axis=1)
    assert (gaps <= found.error[:2] + 1e-12).all()


def test_jacobian_eigenvalues_are_all_for_small_states_and_an_outline_for_large_ones():
    small = torch.randn(3, 5, 5, dtype=torch.float64)
    z = torch.zeros(3, 5, dtype=torch.float64)
    found = jacobian_eigenvalues(lambda z: torch.einsum("bij,bj->bi", small, z), z)
    assert found.whole
    for row, matrix in zip(found.value, small, strict=True):
        expected = np.linalg.eigvals(matrix.numpy())
        assert np.sort_complex(row.numpy()) == pytest.approx(np.sort_complex(expected))
    scale = torch.zeros(600, dtype=torch.float64)
    scale[:4] = torch.tensor([0.9, -0.7, 0.5, 0.2])
    outline = jacobian_eigenvalues(
        lambda z: z * scale, torch.ones(2, 600, dtype=torch.float64), products=20
    )
    assert not outline.whole
    values = outline.value[0][~outline.value[0].isnan()].real.sort().values
    assert values.tolist() == pytest.approx([-0.7, 0, 0.2, 0.5, 0.9], abs=1e-7)


def test_trajectory_ends_at_the_equilibrium_and_says_who_did_not_get_there():
    layer = Equilibrium(Tanh(6), tolerance=1e-5)
    x = torch.randn(7, 6)
    path = trace_solve(layer, x, solver="fixed_point")
    assert path.solver == "fixed_point"
    assert path.missed == 0
    assert path.state.shape == (*path.residual.shape, 6)
    assert np.allclose(path.state[-1], layer(x).detach().numpy(), atol=1e-3)
    assert trace_solve(layer, x, solver="fixed_point", max_steps=1).missed == 7
    with pytest.raises(ValueError, match="nonlinear"):
        trace_solve(layer, x, solver="conjugate_gradient")


@pytest.mark.parametrize("width", [5, 90])
def test_projection_of_paths_is_principal_component_analysis(width):
    from sklearn.decomposition import PCA

    paths = [np.random.default_rng(k).normal(size=(6, 20, width)) for k in (0, 1)]
    for path in paths:
        path[..., 0] *= 5
        path[..., 1] *= 3
    flat, explained = project_paths(paths)
    rows = np.concatenate([path.reshape(-1, width) for path in paths])
    witness = PCA(2, svd_solver="full").fit(rows)
    assert explained == pytest.approx(witness.explained_variance_ratio_)
    assert np.abs(flat[1].reshape(-1, 2)) == pytest.approx(
        np.abs(witness.transform(paths[1].reshape(-1, width))), abs=1e-8
    )
    ends = PCA(2, svd_solver="full").fit(np.concatenate([path[-1] for path in paths]))
    assert project_paths(paths, "ends")[1] == pytest.approx(ends.explained_variance_ratio_)
