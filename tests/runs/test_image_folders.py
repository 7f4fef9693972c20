"""Image folders as people have them: nested, of several sizes, with or without splits to score."""

import pickle

import numpy as np
import pytest
from PIL import Image

from equipoise.data import load_data
from equipoise.runs import evaluate_run, load_config, train_run
from equipoise.runs.samples import load_part, load_samples

SETTINGS = [
    "data.name=image-folder",
    "data.greyscale=true",
    "data.size=[8, 8]",
    "train.epochs=1",
    "train.batch=4",
]


def save(path, height=12, width=12):
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(len(str(path.name)))
    Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)


def write_tiny_imagenet(folder):
    """As published: train/WNID/images, val/images with a list of their classes, test unlabelled."""
    wnids = ["n01443537", "n01629819", "n01641577"]
    for wnid in wnids:
        for i in range(4):
            save(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG")
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
    lines = []
    for i, wnid in enumerate(reversed(wnids)):
        save(folder / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    save(folder / "test" / "images" / "test_0.JPEG")
    (folder / "wnids.txt").write_text("\n".join(wnids))
    (folder / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\n")
    return wnids


def config(folder, *more):
    return load_config("digits", [*SETTINGS, f"data.root={folder}", *more])


def test_tiny_imagenet_is_read_as_published(tmp_path):
    wnids = write_tiny_imagenet(tmp_path)
    samples = load_samples(config(tmp_path).data)
    assert samples.train.classes == tuple(wnids)
    assert len(samples.train) == 12
    assert samples.test.split == "val"
    assert samples.test.y.tolist() == [2, 1, 0]
    assert [int(samples.test[i][1]) for i in range(3)] == [2, 1, 0]
    summary = train_run(config(tmp_path), tmp_path / "run", quiet=True)
    assert summary.test["samples"] == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("../../etc/passwd\tn1\n", "line 1 must be the name of a file, a tab and its class"),
        ("val_0.JPEG n1\n", "line 1 must be"),
        ("", "names no images"),
        ("val_0.JPEG\tn99\n", "is a class that"),
    ],
)
def test_tiny_imagenet_with_a_bad_list_is_refused(tmp_path, text, reason):
    write_tiny_imagenet(tmp_path)
    (tmp_path / "val" / "val_annotations.txt").write_text(text)
    with pytest.raises(ValueError, match=reason):
        load_data("image-folder", "val", tmp_path)


def test_image_folder_finds_images_in_subfolders(tmp_path):
    for name in ("a/1.png", "a/2020/may/2.png", "a/.trash/3.png", "b/deep/4.png"):
        save(tmp_path / "train" / name)
    dataset = load_data("image-folder", root=tmp_path)
    assert [files[0].name for files in dataset.files] == ["1.png", "2.png", "4.png"]
    assert dataset.y.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("splits", "scored"),
    [(("val", "test"), "val"), (("test",), "test"), ((), None)],
    ids=["val", "test", "none"],
)
def test_image_folder_is_scored_on_what_there_is(tmp_path, splits, scored):
    for split in ("train", *splits):
        for i in range(10):
            save(tmp_path / "images" / split / "ab"[i % 2] / f"{i}.png")
    folder = tmp_path / "images"
    if scored:
        assert load_part(config(folder).data, None, None).split == scored
        return
    with pytest.raises(
        ValueError, match=r"data.holdout must be more than 0, since there is no 'val' or 'test'"
    ):
        load_samples(config(folder).data)
    summary = train_run(config(folder, "data.holdout=0.2"), tmp_path / "run", quiet=True)
    assert summary.validation["samples"] == 2
    assert summary.test == {}
    assert evaluate_run(tmp_path / "run").to_dict() == summary.validation
    assert "validation accuracy" in (tmp_path / "run" / "report.html").read_text()


def test_classes_are_chosen_by_name_or_number(tmp_path):
    for split in ("train", "val"):
        for name in ("ape", "bee", "cow"):
            save(tmp_path / split / name / f"{name}.png")
    samples = load_samples(config(tmp_path, 'data.classes=["cow", 0]').data)
    assert samples.train.classes == ("cow", "ape")
    assert samples.train.y.tolist() == [1, 0]
    assert [int(samples.test[i][1]) for i in range(2)] == [1, 0]
    assert [files[0].stem for files in samples.train.files] == ["ape", "cow"]
    again = pickle.loads(pickle.dumps(samples.train))
    assert int(again[1][1]) == 0
    with pytest.raises(
        ValueError,
        match=r"data.classes must be names of classes, ape, bee, cow, or .* Did you mean 'cow'\?",
    ):
        load_samples(config(tmp_path, 'data.classes=["cwo"]').data)
    with pytest.raises(ValueError, match=r"data.classes must be a list of numbers or names; got"):
        config(tmp_path, "data.classes=cow")
    digits = load_config("digits", ['data.classes=["3", 5]']).data
    assert load_samples(digits).train.classes == ("3", "5")


def test_images_of_several_sizes_are_refused_before_anything_is_written(tmp_path):
    for split in ("train", "val"):
        for i in range(4):
            save(tmp_path / split / "ab"[i % 2] / f"{i}.png", 12 + i, 20)
    with pytest.raises(
        ValueError, match=r"data.options.size must be given .*; got images of 20 x 12 and 20 x 14"
    ):
        train_run(config(tmp_path), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    assert load_samples(config(tmp_path, "data.options.size=[8, 8]").data).train.shape == (3, 8, 8)
