"""Boundary value problems on a mesh as fixed points, on which plain iteration hardly moves."""

import torch

SIZE = 50
MESH = 1 / (SIZE + 1)


def poisson(z: torch.Tensor) -> torch.Tensor:
    """Jacobi's iteration for `-u'' = 1`, whose spectral radius is `cos(pi h)`, 0.998."""
    return z - (_laplace(z) - MESH**2) / 2


def bratu(z: torch.Tensor) -> torch.Tensor:
    """The same for `-u'' = 2 exp(u)` (Bratu, 1914)."""
    return z - (_laplace(z) - 2 * MESH**2 * z.exp()) / 2


def _laplace(z: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(z, (1, 1))
    return 2 * z - padded[:, :-2] - padded[:, 2:]
