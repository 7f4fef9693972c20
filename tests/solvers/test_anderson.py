import torch

from equipoise.solvers import Anderson, Status, Stop, solve


def test_mixing_does_not_keep_a_contraction_from_its_equilibrium():
    """Two of these samples cycled: mixing undid what each rest of a few plain steps had gained."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(6, 4, generator=generator)
    W = 0.99 * W / torch.linalg.matrix_norm(W, 2)
    c = torch.randn(5000, 6, generator=generator)

    def step(z):
        return torch.relu(z @ W.T + c) @ W

    found = solve(step, torch.zeros(5000, 4), Anderson(), Stop(1e-5, max_steps=200))
    assert (found.status == Status.CONVERGED).all()
