from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score, recall_score
from torch import Tensor
from torch.nn import functional

from equipoise.data import Dataset
from equipoise.engine.tasks import (
    TASKS,
    BinaryRegression,
    Classification,
    LanguageModelling,
    Restoration,
    Segmentation,
    Task,
    make_task,
)

IGNORE = 255


def batch_of(name: str, count: int = 24, seed: int = 0) -> tuple[Task, Tensor, Tensor]:
    """A task with outputs and targets, some of them ignored where that is possible."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    def whole(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=random)

    if name == "classification":
        return Classification(4), normal(count, 4), whole(4, count)
    if name == "binary-regression":
        return BinaryRegression(), normal(count, 1), whole(2, count)
    if name == "segmentation":
        target = whole(5, count, 3, 6)
        target[whole(3, count, 3, 6) == 0] = IGNORE
        return Segmentation(5, ignore=IGNORE), normal(count, 5, 3, 6), target
    if name == "language":
        target = whole(7, count, 5)
        target[0, -1] = -100
        return LanguageModelling(7, ignore=-100), normal(count, 5, 7), target
    clean = torch.rand(count, 2, 4, 3, generator=random)
    return Restoration(), clean + 0.1 * normal(count, 2, 4, 3), clean


def dataset(
    task: str, classes: int = 3, shape: tuple[int, ...] = (1, 4, 4), ignore: int | None = None
) -> Dataset:
    names = tuple(str(i) for i in range(classes))
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64)
    return Dataset("made-up", "train", task, names, shape, x, y, ignore=ignore)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(TASKS))
def test_score_of_two_parts_adds_up_to_that_of_the_whole(name: str) -> None:
    task, output, target = batch_of(name)
    whole, parts = task.score(), [task.score(), task.score()]
    whole.update(output, target)
    for rows in (slice(0, 5), slice(5, 7), slice(7, 24)):
        parts[rows.start > 4].update(output[rows], target[rows])
    merged = task.score()
    merged.load(parts[0].sums() + parts[1].sums())
    assert merged.sums().dtype == torch.float64
    assert merged.compute() == pytest.approx(whole.compute(), rel=1e-12)
    known = {metric.name for metric in task.metrics}
    assert task.metric.name in whole.compute()
    assert whole.compute().keys() <= known  # some are for two classes, or for many
    assert (whole.confusion is None) == (merged.confusion is None)
    if whole.confusion is not None and merged.confusion is not None:
        assert torch.equal(whole.confusion, merged.confusion)


@pytest.mark.parametrize("name", list(TASKS))
def test_score_of_nothing_is_nan(name: str) -> None:
    task, output, target = batch_of(name)
    score = task.score()
    score.update(output[:0], target[:0])
    assert all(math.isnan(value) for value in score.compute().values())
    with pytest.raises(ValueError, match=r"Score.sums must have shape"):
        score.load(torch.zeros(1))


@pytest.mark.parametrize("name", list(TASKS))
def test_loss_of_parts_weighted_is_that_of_the_whole_and_has_the_right_gradient(name: str) -> None:
    task, output, target = batch_of(name)
    output = output.double().requires_grad_()
    loss = task.loss(output, target)
    parts = [
        (task.loss(output[rows], target[rows]), task.weight(target[rows]))
        for rows in (slice(0, 9), slice(9, 24))
    ]
    mean = sum(part * weight for part, weight in parts) / sum(weight for _, weight in parts)
    assert torch.allclose(loss, mean, rtol=1e-12)
    assert torch.autograd.gradcheck(
        lambda value: task.loss(value, target[:3]), output[:3].detach().requires_grad_()
    )
    task.check(output, target)


@pytest.mark.parametrize("name", list(TASKS))
def test_loss_of_half_precision_is_computed_in_single(name: str) -> None:
    task, output, target = batch_of(name)
    low = output.bfloat16().requires_grad_()
    loss = task.loss(low, target)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, task.loss(low.detach().float(), target))
    loss.backward()
    assert low.grad is not None
    assert low.grad.isfinite().all()
    score = task.score()
    score.update(low, target)
    assert math.isfinite(score.compute()[task.metric.name])


def test_classification_agrees_with_sklearn() -> None:
    task, output, target = batch_of("classification", 200)
    score = task.score()
    score.update(output, target)
    found = output.numpy().argmax(1)
    assert score.compute() == {"accuracy": pytest.approx(accuracy_score(target, found))}
    assert score.confusion is not None
    np.testing.assert_array_equal(score.confusion.numpy(), confusion_matrix(target, found))
    assert torch.equal(task.predict(output), torch.from_numpy(found))


def test_classification_of_very_many_classes_keeps_no_matrix() -> None:
    score = Classification(100_000).score()
    output = torch.zeros(2, 100_000)
    output[:, 7] = 1
    score.update(output, torch.tensor([7, 99_999]))
    assert score.compute() == {"accuracy": 0.5, "top5": 0.5}
    assert score.confusion is None
    assert score.per_class() is None
    assert len(score.sums()) == 3


def test_classification_scores_agree_with_sklearn() -> None:
    output, target = torch.randn(300, 8), torch.arange(300) % 8
    output[torch.arange(300), target] += 1
    score = Classification(8).score()
    for rows in (slice(0, 100), slice(100, None)):
        score.update(output[rows], target[rows])
    found, guess = score.compute(), output.argmax(1)
    expected = metrics.top_k_accuracy_score(target, output, k=5)
    assert found == {
        "accuracy": pytest.approx(float((guess == target).float().mean())),
        "top5": expected,
    }
    columns = metrics.precision_recall_fscore_support(target, guess)
    for each, *row in zip(score.per_class() or (), *columns, strict=True):
        assert [each.precision, each.recall, each.f1, each.count] == pytest.approx(row)
    score.update(torch.full((1, 8), math.nan), torch.tensor([0]))  # no answer, so it is missed
    worse = (score.per_class() or [])[0]
    assert (worse.precision, worse.count) == (pytest.approx(columns[0][0]), columns[3][0] + 1)
    assert worse.recall < columns[1][0]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_area_under_the_roc_curve_agrees_with_sklearn(scale: float) -> None:
    target = torch.arange(2000) % 2
    output = scale * torch.stack([torch.zeros(2000), torch.randn(2000) + target], 1)
    score = Classification(2).score()
    score.update(output, target)
    exact = metrics.roc_auc_score(target, output[:, 1])
    assert score.compute()["auc"] == pytest.approx(exact, abs=2e-3 if scale > 0.01 else 0.05)
    alike = Classification(2).score()
    alike.update(torch.zeros(4, 2), torch.tensor([0, 1, 1, 1]))
    assert alike.compute()["auc"] == 0.5


def test_segmentation_agrees_with_sklearn_on_the_pixels_that_count() -> None:
    task, output, target = batch_of("segmentation", 3)
    target[target == 2] = 1
    output[:, 3] = -9
    target[target == 3] = 0  # class 3 in neither, class 2 in the prediction only
    score = task.score()
    score.update(output, target)
    counts = (target != IGNORE).numpy()
    truth, found = target.numpy()[counts], output.numpy().argmax(1)[counts]
    classes = np.union1d(truth, found)
    assert 2 in found
    assert 3 not in classes
    expected = {
        "miou": jaccard_score(truth, found, labels=classes, average="macro"),
        "macc": recall_score(truth, found, labels=np.unique(truth), average="macro"),
        "aacc": accuracy_score(truth, found),
    }
    assert score.compute() == pytest.approx(expected)
    assert score.confusion is not None
    np.testing.assert_array_equal(
        score.confusion.numpy(), confusion_matrix(truth, found, labels=range(5))
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_segmentation_without_a_pixel_that_counts_has_no_loss_and_no_gradient(
    smoothing: float,
) -> None:
    task = Segmentation(3, ignore=IGNORE, label_smoothing=smoothing)
    output = torch.randn(2, 3, 4, 4, requires_grad=True)
    target = torch.full((2, 4, 4), IGNORE)
    loss = task.loss(output, target)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(output.grad, torch.zeros_like(output))
    assert task.weight(target) == 0
    task.check(output, target)


@pytest.mark.parametrize("name", ["classification", "segmentation", "language"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_agrees_with_its_definition(name: str, smoothing: float) -> None:
    task, output, target = batch_of(name)
    assert isinstance(task, Classification | Segmentation | LanguageModelling)
    task = type(task)(task.classes, ignore=task.ignore, label_smoothing=smoothing)
    logits = (
        np.moveaxis(output.double().numpy(), 1, -1)
        if name == "segmentation"
        else output.double().numpy()
    )
    logits, truth = logits.reshape(-1, task.classes), target.reshape(-1).numpy()
    logits, truth = logits[truth != task.ignore], truth[truth != task.ignore]
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = (1 - smoothing) * np.eye(task.classes)[truth] + smoothing / task.classes
    assert float(task.loss(output, target)) == pytest.approx(
        -(wanted * logs).sum(1).mean(), rel=1e-6
    )
    assert task.weight(target) == len(truth)


def test_perplexity_is_exp_of_the_mean_loss_whatever_the_smoothing() -> None:
    _, output, target = batch_of("language")
    score = LanguageModelling(7, ignore=-100, label_smoothing=0.3).score()
    score.update(output, target)
    plain = functional.cross_entropy(output.movedim(-1, 1), target)
    assert score.compute() == {"perplexity": pytest.approx(math.exp(plain), rel=1e-6)}
    uniform = LanguageModelling(7).score()
    uniform.update(torch.zeros(3, 2, 7), torch.zeros(3, 2, dtype=torch.int64))
    assert uniform.compute() == {"perplexity": pytest.approx(7)}
    uniform.update(
        torch.tensor([[[0.0, 1e6, 0, 0, 0, 0, 0]]]), torch.zeros(1, 1, dtype=torch.int64)
    )
    assert uniform.compute() == {"perplexity": math.inf}


def test_binary_regression_has_half_the_mean_square_and_scores_by_sign() -> None:
    task = BinaryRegression()
    output, target = torch.tensor([[0.5], [-2.0], [3.0], [-0.1]]), torch.tensor([1, 0, 0, 1])
    squares = np.square([0.5 - 1, -2 + 1, 3 + 1, -0.1 - 1])
    assert float(task.loss(output, target)) == pytest.approx(squares.mean() / 2)
    assert torch.equal(task.loss(output, target), task.loss(output[:, 0], target))
    score = task.score()
    score.update(output, target)
    assert score.compute() == {"accuracy": 0.5}
    assert score.confusion is not None
    assert score.confusion.tolist() == [[1, 1], [1, 1]]
    assert task.predict(output).tolist() == [1, 0, 1, 0]


def test_psnr_is_averaged_over_images_and_exact_ones_have_100_decibels() -> None:
    task, output, target = batch_of("restoration")
    score = task.score()
    score.update(output, target)
    errors = ((output.double() - target.double()) ** 2).numpy().mean((1, 2, 3))
    assert score.compute() == {"psnr": pytest.approx(np.mean(10 * np.log10(1 / errors)))}
    assert float(task.loss(output, target)) == pytest.approx(errors.mean(), rel=1e-6)
    score.update(target, target)
    assert score.compute() == {
        "psnr": pytest.approx((np.mean(10 * np.log10(1 / errors)) + 100) / 2)
    }
    assert task.predict(output).min() >= 0
    assert task.predict(output).max() <= 1


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "classification",
            lambda x, y: (x[:, :3], y),
            r"output.*must have 4 numbers for each of 24 targets; got shape \(24, 3\)",
        ),
        ("classification", lambda x, y: (x, y + 1), r"target.*must be in 0 to 3; got 1 to 4"),
        (
            "classification",
            lambda x, y: (x, y.float()),
            r"target.*must hold whole numbers; got torch.float32",
        ),
        ("classification", lambda x, y: (x[:, 0], y), r"output.*got shape \(24,\)"),
        (
            "segmentation",
            lambda x, y: (x[:, :, :2], y),
            r"5 numbers for each of 24 x 3 x 6 targets; got shape \(24, 5, 2, 6\)",
        ),
        ("segmentation", lambda x, y: (x, y - 1), r"must be in 0 to 4; got -1 to 254"),
        (
            "language",
            lambda x, y: (x.movedim(-1, 1), y),
            r"7 numbers for each of 24 x 5 targets; got shape \(24, 7, 5\)",
        ),
        (
            "binary-regression",
            lambda x, y: (x.expand(-1, 2), y),
            r"output.*one number for each sample; got shape \(24, 2\)",
        ),
        ("binary-regression", lambda x, y: (x, y + 1), r"target.*must be classes 0 and 1"),
        (
            "restoration",
            lambda x, y: (x[:, :1], y),
            r"output.*must have the shape \(24, 2, 4, 3\) of the targets; got \(24, 1, 4, 3\)",
        ),
        (
            "restoration",
            lambda x, y: (x, y.long()[:, 0, 0, 0]),
            r"target.*clean images.*Degrade",
        ),
    ],
)
def test_check_says_what_does_not_fit(
    name: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], reason: str
) -> None:
    task, output, target = batch_of(name)
    with pytest.raises(ValueError, match=f"^The .*task '{name}'.*") as caught:
        task.check(*change(output, target))
    assert caught.match(reason)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("classification", Classification(3, label_smoothing=0.1)),
        ("arrays", Classification(3, label_smoothing=0.1)),
        ("segmentation", Segmentation(3, label_smoothing=0.1)),
        ("text", LanguageModelling(3, label_smoothing=0.1, window=1)),
    ],
)
def test_make_task_goes_by_the_data(kind: str, expected: Task) -> None:
    assert make_task("auto", dataset(kind), label_smoothing=0.1) == expected
    assert make_task(expected.name, dataset(kind), label_smoothing=0.1) == expected


def test_make_task_takes_what_to_ignore_from_the_data() -> None:
    assert make_task("auto", dataset("segmentation", ignore=255)) == Segmentation(3, ignore=255)
    assert make_task("binary-regression", dataset("arrays", 2)) == BinaryRegression()
    assert make_task("restoration", dataset("segmentation")) == Restoration()


@pytest.mark.parametrize(
    ("name", "data", "smoothing", "reason"),
    [
        (
            "clasification",
            dataset("arrays"),
            0,
            "task must be one of auto, .*Did you mean 'classification'",
        ),
        (
            "classification",
            dataset("text"),
            0,
            "must have one label for each sample; got text in 'made-up'",
        ),
        (
            "auto",
            dataset("arrays", 0),
            0,
            "must have one label for each sample; got 0 classes in 'made-up'",
        ),
        ("segmentation", dataset("classification"), 0, "must have masks; got classification"),
        ("language", dataset("arrays"), 0, "must be text; got arrays"),
        (
            "binary-regression",
            dataset("arrays", 10),
            0,
            "must have two classes; got 10 in 'made-up'. Select two of them",
        ),
        (
            "restoration",
            dataset("arrays", shape=(4,)),
            0,
            r"must be images; got arrays of shape \(4,\)",
        ),
        ("restoration", dataset("text", shape=(1, 1, 1)), 0, "must be images; got text"),
        (
            "auto",
            dataset("arrays"),
            1.0,
            r"Classification.label_smoothing must be in \[0, 1\); got 1.0",
        ),
        ("auto", dataset("arrays"), math.nan, "label_smoothing must be in"),
        ("restoration", dataset("arrays"), 0.1, "label_smoothing must be 0 for task 'restoration'"),
        (
            "binary-regression",
            dataset("arrays", 2),
            0.1,
            "label_smoothing must be 0 for task 'binary-regression'",
        ),
    ],
)
def test_make_task_refuses_what_does_not_fit(
    name: str, data: Dataset, smoothing: float, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        make_task(name, data, label_smoothing=smoothing)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["classification", "segmentation"])
def test_outputs_that_are_no_numbers_count_as_wrong(name):
    shape = (4, 3) if name == "classification" else (4, 3, 2, 2)
    task = Classification(3) if name == "classification" else Segmentation(3)
    output = torch.zeros(shape)
    output[:, 0] = 1
    target = torch.zeros(
        output.argmax(1).shape, dtype=torch.int64
    )  # all of the first class, as the output says
    output[1] = math.nan
    output[2, 1] = math.inf
    score = task.score()
    score.update(output, target)
    assert score.compute()["accuracy" if name == "classification" else "aacc"] == 0.5
    assert int(score.confusion.sum()) == target.numel() // 2
    if name == "segmentation":  # all four images are of one class, of which half is missed
        assert score.compute() == {"miou": 0.5, "macc": 0.5, "aacc": 0.5}
