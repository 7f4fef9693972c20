from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise.data import Compose, Dataset, PadCropFlip, ToFloat, batch_count, batches


def numbered(count: int = 23) -> Dataset:
    """Images that are full of their own number."""
    y = torch.arange(count)
    x = y.to(torch.uint8).reshape(-1, 1, 1, 1).expand(count, 1, 4, 4).contiguous()
    return Dataset(
        "numbers", "train", "classification", tuple(map(str, range(count))), (1, 4, 4), x, y
    )


def lazily(dataset: Dataset) -> Dataset:
    return Dataset(
        "lazy",
        "train",
        dataset.task,
        dataset.classes,
        dataset.shape,
        sample=dataset.__getitem__,
        count=len(dataset),
    )


def order(**options: object) -> list[int]:
    return [int(i) for _, y in batches(numbered(), 4, **options) for i in y]  # type: ignore[arg-type]


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def test_batches_visit_every_sample_once_with_its_target() -> None:
    found = list(batches(numbered(), 4))
    assert [len(y) for _, y in found] == [4, 4, 4, 4, 4, 3]
    assert sorted(order()) == list(range(23))
    assert all((x == y.reshape(-1, 1, 1, 1)).all() for x, y in found)
    assert order(shuffle=False) == list(range(23))


def test_batches_order_depends_on_seed_and_epoch_alone() -> None:
    first = order(seed=1, epoch=2)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert order(seed=1, epoch=2) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert (
        len({tuple(order(seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}) == 25
    )


@pytest.mark.parametrize("make", [numbered, lambda: lazily(numbered())], ids=["memory", "lazy"])
@pytest.mark.parametrize("world", [1, 3])
def test_batches_resume_bit_for_bit(make: object, world: int) -> None:
    dataset: Dataset = make()  # type: ignore[operator]
    transform = Compose(PadCropFlip(2), ToFloat())
    for rank in range(world):
        whole = list(batches(dataset, 3, 7, 1, transform=transform, rank=rank, world=world))
        assert len(whole) == batch_count(dataset, 3, rank=rank, world=world)
        for start in range(len(whole) + 1):
            assert same(
                list(
                    batches(
                        dataset, 3, 7, 1, transform=transform, rank=rank, world=world, start=start
                    )
                ),
                whole[start:],
            )


def test_batches_of_all_ranks_are_the_batches_of_one_process() -> None:
    alone = [sorted(y.tolist()) for _, y in batches(numbered(24), 6, 3, 4)]
    ranks = [
        [y.tolist() for _, y in batches(numbered(24), 2, 3, 4, rank=rank, world=3)]
        for rank in range(3)
    ]
    assert [sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)] == alone  # noqa: RUF017


@pytest.mark.parametrize("world", [1, 2, 3, 5, 23])
def test_batches_give_ranks_equal_work_when_shuffled_and_every_sample_when_not(world: int) -> None:
    shuffled = [order(rank=rank, world=world) for rank in range(world)]
    assert len({len(rows) for rows in shuffled}) == 1
    assert len({i for rows in shuffled for i in rows}) == 23 - 23 % world
    plain = [order(rank=rank, world=world, shuffle=False) for rank in range(world)]
    assert sorted(i for rows in plain for i in rows) == list(range(23))


def test_batches_transform_ranks_differently() -> None:
    dataset = Dataset(
        "a",
        "train",
        "classification",
        ("0",),
        (1, 9, 9),
        torch.rand(1, 1, 9, 9).expand(8, 1, 9, 9),
        torch.zeros(8).long(),
    )
    first, second = (
        next(iter(batches(dataset, 4, transform=PadCropFlip(4), rank=rank, world=2)))[0]
        for rank in range(2)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": 0}, "batches.size must be a whole number of at least 1"),
        ({"size": 4, "seed": -1}, "batches.seed must be"),
        ({"size": 4, "epoch": 1.5}, "batches.epoch must be"),
        ({"size": 4, "start": 7}, "batches.start must be at most 6, the number of batches; got 7"),
        (
            {"size": 4, "rank": 2, "world": 2},
            "batches.rank must be at most 1; got 2",
        ),
        ({"size": 4, "world": 0}, "batches.world must be"),
        (
            {"size": 4, "world": 24},
            "batches.world must be at most 23, the number of samples; got 24",
        ),
    ],
)
def test_batches_refuse_wrong_settings_at_once(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        batches(numbered(), **options)  # type: ignore[arg-type]


def test_dataset_needs_samples_and_a_known_task() -> None:
    with pytest.raises(ValueError, match="x and y of equal length"):
        Dataset("a", "train", "arrays", (), (), torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"Dataset.task must be one of"):
        Dataset("a", "train", "sound", (), (), torch.zeros(3), torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        numbered().name = "b"  # type: ignore[misc]
