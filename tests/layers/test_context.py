"""What a context may hold: constants, and sparse tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, Implicit, Shared, Stop, Unrolled, solve
from equipoise.testing.gradient_case import unroll

STOP = Stop(tolerance=1e-12, max_steps=400)
NODES = 5

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


def layer_of(cell: Cell, solver: str = "auto", gradient: Any = "implicit") -> Equilibrium:
    return Equilibrium(cell, solver, gradient, on_failure="raise", stop=STOP)


# constants


class Image(Cell):
    """Blurs an image that it gets flattened, with its height and width in the context."""

    def inject(self, x: Tensor) -> Any:
        return {
            "x": x.flatten(1),
            "size": x.shape[1:],
            "strength": 0.5,
            "kind": "tanh",
            "circular": True,
            "nothing": None,
        }

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context["x"])

    def step(self, z: Tensor, context: Any) -> Tensor:
        assert context["nothing"] is None
        image = z.view(-1, *context["size"])
        if context["circular"]:
            image = (image.roll(1, dims=2) + image.roll(1, dims=1)) / 2
        kind = getattr(torch, context["kind"])
        return kind(context["strength"] * image.flatten(1) + context["x"])


@pytest.mark.parametrize("solver", ["anderson", "newton"])
def test_constants_in_a_context_reach_the_step(solver: str) -> None:
    torch.manual_seed(0)
    layer = layer_of(Image(), solver)
    for shape in ((4, 2, 3), (4, 3, 2)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        found, expected = layer(x), unroll(layer.cell, x, 60)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
        gradients = [
            torch.autograd.grad(z.square().sum(), x, create_graph=True)[0]
            for z in (found, expected)
        ]
        torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)
        seconds = [torch.autograd.grad(g.square().sum(), x)[0] for g in gradients]
        torch.testing.assert_close(*seconds, atol=1e-8, rtol=1e-8)


def test_constants_belong_to_the_call_that_made_them() -> None:
    torch.manual_seed(0)
    layer = layer_of(Image())
    wide = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    tall = wide.detach().view(4, 3, 2).requires_grad_()
    both = [layer(wide), layer(tall)]
    found = [
        torch.autograd.grad(z.square().sum(), x)[0] for z, x in zip(both, (wide, tall), strict=True)
    ]
    for gradient, x in zip(found, (wide, tall), strict=True):
        (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
        torch.testing.assert_close(gradient, expected)


def test_constants_stay_with_the_samples_that_are_left() -> None:
    rate = torch.tensor([0.1, 0.2, 0.3, 0.9], dtype=torch.float64)

    def step(z: Tensor, context: Any) -> Tensor:
        own, factor = context
        return factor * own * z + 1

    solution = solve(step, torch.zeros(4, dtype=torch.float64), context=(rate, 0.5), stop=STOP)
    torch.testing.assert_close(solution.value, 1 / (1 - 0.5 * rate))


# sparse tensors


def adjacency() -> Tensor:
    dense = torch.rand(NODES, NODES, dtype=torch.float64)
    dense = torch.where(dense < 0.5, dense, 0.0) + torch.eye(NODES, dtype=torch.float64)
    return 0.8 * dense / dense.sum(dim=1, keepdim=True)


def over_nodes(A: Tensor, z: Tensor) -> Tensor:
    """`A z` for features of shape (batch, nodes, width)."""
    columns = z.transpose(0, 1).reshape(NODES, -1)
    return (A @ columns).view(NODES, len(z), -1).transpose(0, 1)


class Graph(Cell):
    """`z = tanh(A z W + x)` with one graph for all samples, kept in one of several ways."""

    def __init__(self, A: Tensor, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.W = nn.Parameter(torch.randn(3, 3, dtype=torch.float64) / 4)
        if kept == "buffer":
            self.register_buffer("A", A)
        else:
            self.A = A

    def inject(self, x: Tensor) -> Any:
        return x, Shared(self.A) if self.kept == "shared" else None

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(x)

    def step(self, z: Tensor, context: Any) -> Tensor:
        x, A = context
        return torch.tanh(over_nodes(self.A if A is None else A, z) @ self.W.T + x)


def graph(layout: str, kept: str) -> tuple[Graph, Tensor]:
    torch.manual_seed(1)
    A = adjacency()
    chosen = {"dense": A, "coo": A.to_sparse(), "csr": A.to_sparse_csr()}[layout]
    # Some samples are much faster than others, so that they leave the batch.
    size = torch.logspace(-3, 1, 6, dtype=torch.float64)[:, None, None]
    x = size * torch.randn(6, NODES, 3, dtype=torch.float64)
    return Graph(chosen, kept), x.requires_grad_()


@pytest.mark.parametrize("kept", ["buffer", "attribute", "shared"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_adjacency_gives_what_a_dense_one_does(layout: str, kept: str) -> None:
    dense, x = graph("dense", kept)
    sparse, _ = graph(layout, kept)
    (expected_x, expected_W) = torch.autograd.grad(
        unroll(dense, x, 200).square().sum(), (x, dense.W)
    )
    for solver in ("fixed_point", "anderson", "broyden", "newton"):
        z = layer_of(sparse, solver)(x)
        found_x, found_W = torch.autograd.grad(z.square().sum(), (x, sparse.W))
        torch.testing.assert_close(found_x, expected_x, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(found_W, expected_W, atol=1e-9, rtol=1e-9)
    with torch.inference_mode():
        torch.testing.assert_close(layer_of(sparse)(x.detach()), z.detach())
    z = layer_of(sparse, gradient=Unrolled(60))(x)
    torch.testing.assert_close(
        torch.autograd.grad(z.square().sum(), x)[0], expected_x, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("kept", ["buffer", "attribute", "shared"])
def test_sparse_adjacency_in_coordinates_has_second_derivatives(kept: str) -> None:
    seconds = []
    for layout in ("dense", "coo"):
        cell, x = graph(layout, kept)
        z = unroll(cell, x, 100) if layout == "dense" else layer_of(cell)(x)
        first = torch.autograd.grad(z.square().sum(), (x, cell.W), create_graph=True)
        size = sum(g.square().sum() for g in first)
        seconds.append(torch.autograd.grad(size, (x, cell.W)))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("kept", ["buffer", "attribute", "shared"])
def test_compressed_adjacency_refuses_second_derivatives_in_one_sentence(kept: str) -> None:
    cell, x = graph("csr", kept)
    z = layer_of(cell)(x)
    with pytest.raises(ValueError, match=r"^A step with sparse tensors in compressed .*_coo\(\)\."):
        torch.autograd.grad(z.square().sum(), x, create_graph=True)


class LearnedGraph(Graph):
    """The graph of one batch with trainable weights on its edges."""

    def __init__(self, kept: str) -> None:
        super().__init__(adjacency(), "shared")
        self.edges = self.A.nonzero().T
        self.weights = nn.Parameter(self.A[self.A > 0].clone())
        self.layout = kept

    def inject(self, x: Tensor) -> Any:
        A = torch.sparse_coo_tensor(
            self.edges, self.weights, (NODES, NODES), check_invariants=True, is_coalesced=True
        )
        return x, Shared(A.to_dense() if self.layout == "dense" else A)


def test_trainable_edges_get_their_gradients() -> None:
    found = []
    for layout in ("dense", "coo"):
        torch.manual_seed(2)
        cell = LearnedGraph(layout)
        x = torch.randn(4, NODES, 3, dtype=torch.float64)
        layer_of(cell)(x).square().sum().backward()
        found.append(cell.weights.grad)
    torch.testing.assert_close(found[1], found[0], atol=1e-9, rtol=1e-9)


class GraphEach(Cell):
    """`z = tanh(A_i z + x)` with a graph `A_i` of its own for each sample."""

    def inject(self, x: Any) -> Any:
        return x

    def initial(self, x: Any, context: Any) -> Tensor:
        return torch.zeros_like(x[0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        x, A = context
        return torch.tanh(torch.bmm(A, z) + x)


def test_sparse_graphs_of_samples_leave_the_batch_with_them() -> None:
    torch.manual_seed(3)
    size = torch.tensor([0.01, 0.01, 0.1, 0.1, 1.2, 1.2], dtype=torch.float64)
    A = size[:, None, None] * torch.stack([adjacency() for _ in size])
    x = torch.randn(6, NODES, 2, dtype=torch.float64, requires_grad=True)
    layer = layer_of(GraphEach(), "fixed_point", Implicit("fixed_point"))
    z = layer((x, A.to_sparse()))
    assert layer.last.steps.max() > 2 * layer.last.steps.min()
    expected = unroll(layer.cell, (x, A), 300)
    torch.testing.assert_close(z, expected, atol=1e-9, rtol=1e-9)
    gradients = [torch.autograd.grad(value.square().sum(), x)[0] for value in (z, expected)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_compressed_graphs_of_samples_are_refused() -> None:
    A = torch.stack([torch.eye(NODES, dtype=torch.float64)] * 2).to_sparse_csr()
    x = torch.randn(2, NODES, 2, dtype=torch.float64)
    sentence = r"^A context tensor must be dense, sparse COO or Shared; got torch.sparse_csr"
    with pytest.raises(ValueError, match=sentence):
        layer_of(GraphEach())((x, A))
