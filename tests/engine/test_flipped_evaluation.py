"""Scores of the mean output for an image and its mirror image."""

import pytest
import torch
from torch import nn

from equipoise.data import Dataset
from equipoise.engine import evaluate, make_task


class LeftColumn(nn.Module):
    """Sees only the left column of an image, so that a mirror image is another one to it."""

    def forward(self, x):
        left = x[:, 0, :, 0].sum(1)
        return torch.stack([torch.zeros_like(left), left], 1)


def images(task="classification"):
    x = torch.zeros(2, 1, 4, 4)
    x[:, 0, :, 0] = -1.0  # to the left all are of class 0
    x[1, 0, :, 3] = 5.0  # and the second of class 1 to the right
    y = torch.tensor([0, 1]) if task == "classification" else torch.zeros(2, 4, 4).long()
    return Dataset("columns", "test", task, ("a", "b"), (1, 4, 4), x, y)


def test_flipped_evaluation_scores_the_mean_of_both_outputs():
    data = images()
    task = make_task("auto", data)
    assert evaluate(LeftColumn(), task, data).metrics["accuracy"] == 0.5
    found = evaluate(LeftColumn(), task, data, flip=True)
    assert found.metrics["accuracy"] == 1
    # outputs of the second class are (-4 + 0)/2 and (-4 + 20)/2
    expected = torch.nn.functional.cross_entropy(
        torch.tensor([[0.0, -2.0], [0.0, 8.0]]), torch.tensor([0, 1])
    )
    assert found.metrics["loss"] == pytest.approx(expected.item())


def test_flipped_evaluation_is_refused_where_answers_would_have_to_flip():
    data = images("segmentation")
    with pytest.raises(
        ValueError,
        match=r"^evaluate.flip must be False but for classes of images; got segmentation of "
        r"samples of shape \(1, 4, 4\)\.$",
    ):
        evaluate(LeftColumn(), make_task("auto", data), data, flip=True)


def test_evaluation_leaves_each_part_of_a_model_in_its_own_mode():
    data = images()
    model = nn.Sequential(nn.BatchNorm2d(1), LeftColumn())
    model[0].eval()  # frozen while the others train
    evaluate(model, make_task("auto", data), data)
    assert [part.training for part in model.modules()] == [True, False, True]
