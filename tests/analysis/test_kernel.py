import math

import pytest
import torch
from torch import nn

from equipoise import create_model
from equipoise.analysis import kernel as kernel_module
from equipoise.analysis import kernel_spectrum, tangent_kernel
from equipoise.core import memory


def test_kernel_of_a_linear_model_is_known():
    model = nn.Linear(3, 2, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = torch.kron(x @ x.T + 1, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(tangent_kernel(model, x), expected)


@pytest.mark.parametrize("method", ["func", "samples"])
def test_kernel_of_an_equilibrium_is_the_same_in_chunks_and_by_both_methods(method):
    torch.manual_seed(0)
    model = create_model("monotone-digits", num_classes=2, tolerance=1e-12, max_steps=500).double()
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    whole = tangent_kernel(model, x)
    torch.testing.assert_close(tangent_kernel(model, x, chunk=2, method=method), whole)
    assert float(kernel_spectrum(whole)[0]) > 0
    assert model.training


def test_kernel_of_a_loosely_solved_equilibrium_is_exact_all_the_same():
    torch.manual_seed(0)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    exact = create_model("monotone-digits", num_classes=2, tolerance=1e-13, max_steps=999).double()
    loose = create_model(
        "monotone-digits",
        num_classes=2,
        tolerance=0.3,
        gradient="jacobian_free",
        eval_options={"max_steps": 1},
        on_failure="raise",
    ).double()
    loose.load_state_dict(exact.state_dict())
    layer = loose.equilibrium
    before = layer.stop, layer.gradient, layer.eval_options
    torch.testing.assert_close(
        tangent_kernel(loose, x), tangent_kernel(exact, x), rtol=1e-10, atol=1e-10
    )
    assert (layer.stop, layer.gradient, layer.eval_options) == before


def test_kernel_falls_back_to_single_samples_where_torch_func_cannot_go():
    class Stubborn(nn.Linear):
        def forward(self, x):
            if torch._C._functorch.is_functorch_wrapped_tensor(x):
                raise RuntimeError("vmap is not for me")
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Stubborn(3, 1), torch.randn(4, 3)
    torch.testing.assert_close(tangent_kernel(model, x), x @ x.T + 1)
    with pytest.raises(RuntimeError, match="vmap is not for me"):
        tangent_kernel(model, x, method="func")


def test_kernel_that_would_not_fit_is_refused_before_with_its_size(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 10**6)
    with pytest.raises(ValueError, match=r"kernel of 1,000 x 1,000 .* got 0\.004 GB"):
        tangent_kernel(nn.Linear(3, 1), torch.zeros(1000, 3))


def test_kernel_of_a_frozen_model_is_refused():
    model = nn.Linear(3, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="must have parameters to train; got Linear"):
        tangent_kernel(model, torch.zeros(2, 3))


def test_memory_is_unlimited_where_the_system_does_not_say(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    memory.require_memory("key", 10**18, "anything")
    monkeypatch.setattr(kernel_module, "available_memory", lambda: None)
    assert math.isfinite(float(tangent_kernel(nn.Linear(2, 1), torch.ones(2, 2)).sum()))


def test_kernel_leaves_each_part_of_a_model_in_its_own_mode():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[1].eval()  # frozen while the others train
    tangent_kernel(model, torch.randn(4, 3))
    assert [part.training for part in model.modules()] == [True, True, False, True]
