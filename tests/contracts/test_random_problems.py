"""Random problems at default settings: what is called converged has converged."""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

from equipoise import ConvergenceWarning

FILE = Path(__file__).parents[2] / "benchmarks" / "random_problems.py"
PARTS = 20
SIZE = 1000


@pytest.fixture(scope="module")
def problems():
    spec = importlib.util.spec_from_file_location("random_problems", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def false_claims(problems, indices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = [verdict for index in indices for verdict in problems.examine(0, index)]
    assert len(found) >= len(indices)
    foreign = [v for v in found if v.error and "coupled must be True" not in v.error]
    return [v for v in found if v.statuses["FALSE"]] + foreign


def test_no_sample_of_some_hundreds_is_falsely_converged(problems):
    assert not false_claims(problems, range(260))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_sample_of_twenty_thousand_is_falsely_converged(problems, part):
    assert not false_claims(problems, range(part * SIZE, (part + 1) * SIZE))
