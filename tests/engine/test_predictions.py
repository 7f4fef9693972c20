from __future__ import annotations

import csv
import io
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import softmax
from torch import Tensor, nn

from equipoise.core import ConvergenceWarning
from equipoise.data import (
    Compose,
    DataError,
    Dataset,
    Degrade,
    Greyscale,
    Normalize,
    Resize,
    ToFloat,
)
from equipoise.data.image_depth import ImageWarning
from equipoise.data.vocabulary import Vocabulary
from equipoise.engine import evaluate
from equipoise.engine.inputs import UnknownTokenWarning, read_inputs
from equipoise.engine.predict import Prediction, Written, predict, write_predictions
from equipoise.engine.tasks import (
    BinaryRegression,
    Classification,
    ImageAnswer,
    LabelAnswer,
    LanguageModelling,
    MaskAnswer,
    Restoration,
    Segmentation,
)
from equipoise.layers import Cell, Equilibrium
from equipoise.models import create_model

DIGITS = tuple("0123456789")
WORDS = ("the", "cat", "sat", "<eos>", "<unk>")


def picture(path: Path, height: int = 8, width: int = 8, seed: int = 0, mode: str = "RGB") -> Path:
    """Write a random picture that is stored without loss."""
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def rows_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


class NextWord(nn.Module):
    """Says that each word is followed by the next one of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.lengths.append(x.shape[1])
        return nn.functional.one_hot((x + 1) % len(WORDS), len(WORDS)).float()


class Scaled(Cell):
    """`z = x z + 1`, which has an attracting solution where |x| < 1."""

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return context * z + 1

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return torch.zeros_like(x)


def test_classification_says_what_the_model_says_with_softmax_probabilities(tmp_path: Path) -> None:
    model = create_model("opteq-digits").train()
    paths = [picture(tmp_path / f"{i}.png", mode="L", seed=i) for i in range(5)]
    transform = Compose(ToFloat(), Normalize(0.3, 0.4))
    found = list(
        predict(
            model,
            Classification(10),
            read_inputs(paths, shape=(1, 8, 8)),
            classes=DIGITS,
            transform=transform,
            batch=2,
        )
    )
    assert model.training
    x = torch.stack([torch.from_numpy(np.array(Image.open(path)))[None] for path in paths]) / 255
    with torch.no_grad():
        expected = softmax(model.eval()((x - 0.3) / 0.4).numpy(), axis=1)
    order = expected.argsort(1)[:, ::-1]
    assert [each.name for each in found] == [str(path) for path in paths]
    assert [each.answer.label for each in found] == [DIGITS[i] for i in order[:, 0]]
    np.testing.assert_allclose(
        [each.answer.probability for each in found], expected.max(1), rtol=1e-3
    )  # batches end at other steps
    assert [[label for label, _ in each.answer.top] for each in found] == [
        [DIGITS[i] for i in row] for row in order
    ]
    assert all(each.answer.top[0] == (each.answer.label, each.answer.probability) for each in found)
    assert all(each.converged for each in found)


def test_binary_regression_has_the_probability_that_the_square_loss_makes() -> None:
    inputs = [(str(value), torch.tensor([value])) for value in (0.5, -0.2, 3.0, -1.5)]
    found = list(predict(nn.Identity(), BinaryRegression(), inputs, classes=("no", "yes")))
    assert [each.answer.label for each in found] == ["yes", "no", "yes", "no"]
    assert [each.answer.probability for each in found] == pytest.approx([0.75, 0.6, 1.0, 1.0])
    assert found[0].answer.top == (("yes", 0.75), ("no", 0.25))


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_prediction_tells_of_each_sample_whether_it_converged(batch: int) -> None:
    model = nn.Sequential(
        Equilibrium(Scaled(), "fixed_point", on_failure="ignore"), nn.Linear(1, 2)
    )
    inputs = [(f"{value}", torch.tensor([value])) for value in (0.5, 2.0, 0.1, -0.5, -1.0)]
    found = list(predict(model, Classification(2), inputs, classes=("a", "b"), batch=batch))
    assert [each.converged for each in found] == [True, False, True, True, False]
    stream = io.StringIO()
    assert write_predictions(found, None, stream).missed == 2
    assert [row[-1] for row in rows_of(stream.getvalue())] == [
        "converged",
        "true",
        "false",
        "true",
        "true",
        "false",
    ]


def test_prediction_of_samples_that_are_solved_as_one_converges_as_one() -> None:
    cell = Scaled()
    cell.coupled = True
    model = nn.Sequential(Equilibrium(cell, "fixed_point", on_failure="ignore"), nn.Linear(1, 2))
    inputs = [(f"{value}", torch.tensor([value])) for value in (0.5, 2.0, 0.1, -0.5)]
    found = predict(model, Classification(2), inputs, classes=("a", "b"), batch=2)
    assert [each.converged for each in found] == [False, False, True, True]


def test_prediction_warns_as_the_layer_is_told_to() -> None:
    model = nn.Sequential(Equilibrium(Scaled(), "fixed_point"), nn.Linear(1, 2))
    with pytest.warns(ConvergenceWarning):
        list(predict(model, Classification(2), [("a", torch.tensor([2.0]))], classes=("a", "b")))


def test_labels_are_lines_of_csv_on_the_stream_or_in_a_file(tmp_path: Path) -> None:
    found = [
        Prediction('odd, "name".png', True, LabelAnswer((("cat", 0.75),))),
        Prediction("b.png", False, LabelAnswer((("dog", 1 / 3),))),
    ]
    stream, file = io.StringIO(), tmp_path / "labels.csv"
    assert write_predictions(iter(found), None, stream) == Written(missed=1)
    expected = [
        ["file", "label", "probability", "converged"],
        ['odd, "name".png', "cat", "0.75", "true"],
        ["b.png", "dog", "0.333333", "false"],
    ]
    assert rows_of(stream.getvalue()) == expected
    nothing = io.StringIO()
    write_predictions(found, file, nothing)
    assert nothing.getvalue() == ""
    assert file.read_text() == stream.getvalue()
    with pytest.raises(
        ValueError, match="must be a file for answers that make one table; got the folder"
    ):
        write_predictions(found, tmp_path, nothing)
    assert write_predictions([], None, nothing) == Written()


def test_masks_keep_the_class_as_the_value_of_each_pixel(tmp_path: Path) -> None:
    path = picture(tmp_path / "street.png", 6, 9)
    model = nn.Conv2d(3, 3, 1, bias=False)
    model.weight.data = torch.eye(3)[:, :, None, None]  # the class is the strongest colour
    inputs = read_inputs([path], shape=(3, 4, 4), multiple=1)
    found = list(
        predict(
            model, Segmentation(3), inputs, classes=("red", "green", "blue"), transform=ToFloat()
        )
    )
    stream, folder = io.StringIO(), tmp_path / "new" / "masks"
    write_predictions(found, folder, stream)
    mask = Image.open(folder / "street.png")
    assert mask.mode == "P"
    np.testing.assert_array_equal(np.array(mask), np.array(Image.open(path)).argmax(2))
    colours = np.array(mask.getpalette()).reshape(-1, 3)
    assert len(np.unique(colours, axis=0)) == len(colours)
    assert rows_of(stream.getvalue())[1] == [str(path), str(folder / "street.png"), "true"]


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
@pytest.mark.parametrize("noise", [False, True])
def test_pictures_come_back_as_they_were_through_the_identity(
    tmp_path: Path, mode: str, channels: int, noise: bool
) -> None:
    path = picture(tmp_path / "a.png", 5, 7, mode=mode)
    transform = Compose(ToFloat(), Degrade(1.0)) if noise else None
    inputs = read_inputs([tmp_path], shape=(channels, 5, 7))
    write_predictions(
        predict(nn.Identity(), Restoration(), inputs, classes=(), transform=transform),
        tmp_path / "out",
        io.StringIO(),
    )
    found = Image.open(tmp_path / "out" / "a.png")
    assert found.mode == mode
    np.testing.assert_array_equal(np.array(found), np.array(Image.open(path)))


def test_greys_of_16_bits_come_back_with_16_bits(tmp_path: Path) -> None:
    greys = np.random.default_rng(0).integers(0, 65536, (5, 7)).astype(np.uint16)
    Image.fromarray(greys).save(tmp_path / "a.png")
    inputs = read_inputs([tmp_path / "a.png"], shape=(3, 8, 8), multiple=1, deep=True)
    found = predict(nn.Identity(), Restoration(), inputs, classes=(), transform=Greyscale())
    write_predictions(found, tmp_path / "out", io.StringIO())
    restored = Image.open(tmp_path / "out" / "a.png")
    assert restored.mode.startswith("I;16")
    np.testing.assert_array_equal(np.array(restored), greys)


def test_image_whose_bits_are_guessed_or_lost_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.full((2, 2), 4095, np.uint16)).save(path)
    with pytest.warns(ImageWarning, match=r"a.png: its greys reach 4095 of 65535, .* have 12 bits"):
        list(read_inputs([path], shape=(3, 2, 2)))
    # Pillow writes no colours of 16 bits: the header and one white pixel.
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(b"\0" + b"\xff" * 6)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        content += struct.pack(">I", len(data)) + name + data
        content += struct.pack(">I", zlib.crc32(name + data))
    path.write_bytes(content)
    with pytest.warns(ImageWarning, match=r"16 bits for each channel, of which only the upper 8"):
        list(read_inputs([path], shape=(3, 1, 1)))


def test_pictures_are_rounded_to_the_nearest_byte_and_cut_to_what_bytes_can_hold(
    tmp_path: Path,
) -> None:
    values = torch.tensor([[[-1.0, 0.4 / 255, 0.6 / 255, 254.4 / 255, 254.6 / 255, 7.0]]])
    write_predictions([Prediction("a", True, ImageAnswer(values))], tmp_path / "out", io.StringIO())
    assert np.array(Image.open(tmp_path / "out" / "a.png")).tolist() == [[0, 0, 1, 254, 255, 255]]


def test_outputs_have_safe_names_within_an_empty_folder(tmp_path: Path) -> None:
    grey = torch.zeros(1, 2, 2)
    names = [
        "../../up.png",
        "/etc/up.jpg",
        "x.npy[0]",
        "x.npy[1]",
        "..",
        "UP.bmp",
        "a\nb*?.png",
        ".hidden",
        "é" * 300,
    ]
    stream, out = io.StringIO(), tmp_path / "out"
    write_predictions([Prediction(name, True, ImageAnswer(grey)) for name in names], out, stream)
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == sorted(
        path.name for path in out.iterdir()
    )
    expected = ["up", "up-2", "x[0]", "x[1]", "sample", "UP-3", "a_b__", "hidden", "é" * 100]
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{name}.png" for name in expected)
    with pytest.raises(ValueError, match="must be an empty folder, so that nothing is overwritten"):
        write_predictions([Prediction("a", True, ImageAnswer(grey))], out, stream)
    with pytest.raises(ValueError, match="must be a folder for answers that are files; got None"):
        write_predictions([Prediction("a", True, ImageAnswer(grey))], None, stream)
    with pytest.raises(
        ValueError, match="must be a folder for answers that are files; got the file"
    ):
        write_predictions([Prediction("a", True, ImageAnswer(grey))], out / "up.png", stream)
    with pytest.raises(DataError, match="a: has class 256 in its mask"):
        write_predictions(
            [Prediction("a", True, MaskAnswer(torch.tensor([[256]])))], tmp_path / "masks", stream
        )
    with pytest.raises(DataError, match="a: has 2 channels"):
        write_predictions(
            [Prediction("a", True, ImageAnswer(torch.zeros(2, 2, 2)))],
            tmp_path / "pictures",
            stream,
        )


@pytest.mark.parametrize(("window", "lengths"), [(None, [3, 4, 5]), (2, [2, 2, 2])])
def test_language_goes_on_with_the_most_probable_words(
    tmp_path: Path, window: int | None, lengths: list[int]
) -> None:
    (tmp_path / "a.txt").write_text("cat dog\n")
    (tmp_path / "b.txt").write_text("the\ncat\n")
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.warns(UnknownTokenWarning, match="does not know 'dog', and reads <unk> in place"):
        inputs = list(read_inputs(paths, shape=(), vocabulary=Vocabulary("words", WORDS)))
    assert [x.tolist() for _, x in inputs] == [[1, 4], [0, 3, 1]]
    model = NextWord()
    found = list(
        predict(model, LanguageModelling(5, continuation=3, window=window), inputs, classes=WORDS)
    )
    assert [each.answer.text for each in found] == ["cat <unk> the cat sat", "the\ncat sat\n<unk>"]
    assert model.lengths[3:] == lengths
    stream = io.StringIO()
    write_predictions(found, None, stream)
    assert rows_of(stream.getvalue())[2] == [str(paths[1]), "the\ncat sat\n<unk>", "true"]


def test_pictures_are_read_grey_or_coloured_at_the_size_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("b.png", "a.bmp"):
        picture(folder / name, 21, 31)
    picture(folder / ".hidden.png")
    (folder / "note.txt").write_text("x")
    (folder / "deeper").mkdir()
    picture(folder / "deeper" / "c.png")
    fixed = list(read_inputs([folder], shape=(1, 8, 9)))
    assert [Path(name).name for name, _ in fixed] == ["a.bmp", "b.png", "c.png"]
    assert all(x.shape == (1, 8, 9) and x.dtype == torch.uint8 for _, x in fixed)
    assert [
        tuple(x.shape) for _, x in read_inputs([folder / "b.png"], shape=(3, 8, 9), multiple=8)
    ] == [(3, 24, 32)]
    assert [
        tuple(x.shape) for _, x in read_inputs([folder / "b.png"], shape=(3, 8, 9), multiple=64)
    ] == [(3, 64, 64)]
    (_, whole), *_ = read_inputs([folder / "b.png"], shape=(3, 8, 9), multiple=1)
    np.testing.assert_array_equal(
        whole.movedim(0, -1).numpy(), np.array(Image.open(folder / "b.png"))
    )
    (_, grey), *_ = read_inputs([folder / "b.png"], shape=(1, 21, 31))
    luminance = np.array(Image.open(folder / "b.png").convert("L")).astype(int)
    assert np.abs(grey[0].numpy().astype(int) - luminance).max() <= 1


def test_pictures_that_are_grey_already_pass_a_transform_that_makes_them_grey(
    tmp_path: Path,
) -> None:
    inputs = read_inputs([picture(tmp_path / "a.png", 9, 9)], shape=(1, 8, 8))
    transform = Compose(Greyscale(), Resize((8, 8)), ToFloat())
    found = list(
        predict(
            create_model("opteq-digits"),
            Classification(10),
            inputs,
            classes=DIGITS,
            transform=transform,
        )
    )
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_arrays_and_tables_hold_many_samples(tmp_path: Path, dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 200, (3, 64)).astype(dtype)
    np.save(tmp_path / "flat.npy", values)
    np.save(tmp_path / "square.npy", np.asfortranarray(values.reshape(3, 8, 8)))
    np.save(tmp_path / "one.npy", values[0].reshape(1, 8, 8))
    np.savez_compressed(tmp_path / "two.npz", x=values.reshape(3, 1, 8, 8), y=[1, 2, 3])
    np.savez(tmp_path / "single.npz", values)
    np.savetxt(tmp_path / "plain.csv", values, delimiter=",")
    np.savetxt(
        tmp_path / "labelled.csv",
        np.c_[values, [0, 1, 2]],
        delimiter=",",
        header=",".join(f"c{i}" for i in range(65)),
    )
    for path in sorted(tmp_path.iterdir()):
        found = list(read_inputs([path], shape=(1, 8, 8)))
        assert [name for name, _ in found] == [f"{path}[{i}]" for i in range(len(found))]
        assert len(found) == (1 if path.stem == "one" else 3)
        for (_, x), row in zip(found, values, strict=False):
            np.testing.assert_array_equal(x.numpy().ravel(), row.astype(x.numpy().dtype))
            assert x.dtype == (
                torch.uint8 if dtype == np.uint8 and path.suffix != ".csv" else torch.float32
            )


def test_arrays_of_free_size_must_have_sides_that_are_multiples(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 8, 16)))
    assert [
        tuple(x.shape) for _, x in read_inputs([tmp_path / "a.npy"], shape=(3, 4, 4), multiple=8)
    ] == [(3, 8, 16)] * 2
    with pytest.raises(
        DataError, match=r"a.npy: holds samples of shape \(3, 8, 16\); the model takes \(3, 4, 4\)"
    ):
        list(read_inputs([tmp_path / "a.npy"], shape=(3, 4, 4), multiple=16))


def bad_file(folder: Path, name: str) -> Path:
    path = folder / name
    contents: dict[str, bytes] = {
        "page.png": b"<html>",
        "empty.png": b"",
        "short.npy": b"\x93NUMPY\x01\x00",
        "no.npz": b"PK nothing",
        "words.csv": b"1,2,3,4\n1,two,3,4\n",
        "uneven.csv": b"1,2,3,4\n1,2\n",
        "gap.csv": b"1,,3,4\n",
        "infinite.csv": b"1,2,3,inf\n",
        "narrow.csv": b"1,2\n",
        "names.csv": b"a,b,c,d\n",
        "binary.txt": b"the \xff",
        "zero.txt": b"the \0 cat",
        "blank.txt": b" \n",
        "thing.tif": b"II*\0",
    }
    if name in contents:
        path.write_bytes(contents[name])
    elif name == "objects.npy":
        np.save(path, np.array([{}, None], dtype=object))
    elif name == "last.npy":
        np.save(path, np.zeros((3, 2, 2, 1)))
    elif name == "nan.npy":
        np.save(path, np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]))
    elif name == "huge.npy":
        np.save(path, np.full((1, 4), 1e300))
    elif name == "several.npz":
        np.savez(path, a=np.zeros(2), b=np.zeros(2))
    elif name == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("page.png", "is not an image"),
        ("empty.png", "is empty"),
        ("absent.png", "is not there"),
        ("folder", "is a folder without images"),
        ("thing.tif", "must be an image"),
        ("short.npy", "."),
        ("objects.npy", "Python objects"),
        ("last.npy", r"holds samples of shape \(2, 2, 1\); the model takes \(1, 2, 2\)"),
        ("nan.npy", "sample 1 holds a number that is not finite"),
        ("huge.npy", "sample 0 holds a number that is not finite"),
        ("several.npz", "must hold an array 'x', or only one; it has a, b"),
        ("no.npz", "cannot be read"),
        ("words.csv", "row 2, column '2' is 'two', not a finite number"),
        ("uneven.csv", "has 2 columns in row 2; 4 expected"),
        ("gap.csv", "row 1, column '2' is missing"),
        ("infinite.csv", "row 1, column '4' is 'inf', not a finite number"),
        ("narrow.csv", r"holds samples of shape \(2,\)"),
        ("names.csv", "holds no samples"),
    ],
)
def test_bad_input_is_an_error_of_one_line_that_names_the_file(
    tmp_path: Path, name: str, reason: str
) -> None:
    path = bad_file(tmp_path, name)
    with pytest.raises(DataError, match=reason) as caught:
        list(read_inputs([path], shape=(1, 2, 2)))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "vocabulary", "reason"),
    [
        ("binary.txt", WORDS, "is not text in UTF-8"),
        ("zero.txt", WORDS, "zero bytes"),
        ("blank.txt", WORDS, "holds no words"),
        ("page.png", WORDS, "must be text"),
        ("words.csv", WORDS, "must be text"),
        ("blank.txt", None, "must be an image"),
    ],
)
def test_bad_text_is_an_error_of_one_line_that_names_the_file(
    tmp_path: Path, name: str, vocabulary: Sequence[str] | None, reason: str
) -> None:
    path = bad_file(tmp_path, name)
    known = None if vocabulary is None else Vocabulary("words", tuple(vocabulary))
    with pytest.raises(DataError, match=reason) as caught:
        list(read_inputs([path], shape=(4,), vocabulary=known))
    assert str(caught.value).startswith(f"{path}: ")


def test_unknown_words_need_a_vocabulary_that_has_one_for_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the dog")
    with pytest.raises(DataError, match=r"a.txt: 'dog' is not in the vocabulary"):
        list(read_inputs([tmp_path / "a.txt"], shape=(), vocabulary=Vocabulary("words", ("the",))))


def test_what_the_model_refuses_names_the_sample(tmp_path: Path) -> None:
    model = create_model("opteq-digits")
    with pytest.raises(DataError, match=r"^a.png: The input of opteq-digits must have shape"):
        list(predict(model, Classification(10), [("a.png", torch.zeros(3, 8, 8))], classes=DIGITS))
    with pytest.raises(DataError, match=r"^a.png: the model tells 10 classes apart; 2 have names"):
        list(
            predict(model, Classification(2), [("a.png", torch.zeros(1, 8, 8))], classes=("a", "b"))
        )
    assert model.training
    with pytest.raises(
        DataError, match=r"a.png: is an image; the model takes samples of shape \(64,\)"
    ):
        list(read_inputs([picture(tmp_path / "a.png")], shape=(64,)))


def test_prediction_refuses_numbers_below_one() -> None:
    with pytest.raises(ValueError, match=r"predict\.batch must be a whole number of at least 1"):
        list(predict(nn.Identity(), Restoration(), [], classes=(), batch=0))
    for option in ("continuation", "window"):
        with pytest.raises(ValueError, match=f"LanguageModelling.{option} must be a whole number"):
            LanguageModelling(5, **{option: 0})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind,a,b\n9,1,2\n", [[1, 2]]),
        ("a,b,kind\n1,2,9\n", [[1, 2]]),
        ("a,kind,b\n1,cat,2\n", [[1, 2]]),  # a label need not be a number
        ("b,a\n2,1\n", [[1, 2]]),
        ("a,b\n1,2\n", [[1, 2]]),
        ("1,2\n3,4\n", [[1, 2], [3, 4]]),
    ],
)
def test_table_gives_the_columns_that_the_model_was_trained_on(
    tmp_path: Path, text: str, expected: list[list[float]]
) -> None:
    (tmp_path / "a.csv").write_text(text)
    found = read_inputs([tmp_path / "a.csv"], shape=(2,), columns=("a", "b"))
    assert [sample.tolist() for _, sample in found] == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,2,9\n", "has 3 columns without names, so it cannot be told which one is the label"),
        ("a,c,kind\n1,2,9\n", "has no column 'b'; the model was trained on a, b"),
        ("a,a,b\n1,2,9\n", "must give each column a name of its own"),
        ("a,b,kind\n1,2\n", "has 2 columns in row 2; 3 expected"),
        ("a;b\n1,5;2\n", "row 2, column 'a' is '1,5', a number with a comma; write decimal points"),
        ("1,5;2,5\n3,5;4,5\n", "has '1,5' in its first row, a number with a comma; write decimal"),
        ('"1,5","2,5"\n"3,5","4,5"\n', "row 1 has '1,5', a number; write decimal points"),
        ("a,b\n1,5,2,5\n", r"has 4 columns in row 2; 2 expected \(if its numbers have decimal"),
    ],
)
def test_table_whose_features_cannot_be_told_is_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=reason):
        list(read_inputs([tmp_path / "a.csv"], shape=(2,), columns=("a", "b")))


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_outputs_that_are_not_finite_are_counted(batch: int) -> None:
    values = (1.0, math.nan, -1.0, math.inf)
    inputs = [(f"{value}", torch.tensor([value])) for value in values]
    found = list(
        predict(nn.Identity(), BinaryRegression(), inputs, classes=("a", "b"), batch=batch)
    )
    assert [each.finite for each in found] == [True, False, True, False]
    assert write_predictions(found, None, io.StringIO()) == Written(missed=0, nonfinite=2)


@pytest.mark.filterwarnings("ignore::equipoise.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:own test. AUC is not known")
def test_samples_whose_solve_met_nan_are_scored_as_wrong() -> None:
    layer = Equilibrium(Scaled(), "fixed_point", on_failure="ignore")
    model = nn.Sequential(layer, nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]))  # says class 0 of all that is positive
    x = torch.tensor([[0.5], [math.nan], [0.25], [math.nan]])
    data = Dataset("own", "test", "arrays", ("a", "b"), (1,), x, torch.tensor([0, 0, 0, 1]))
    # What the layer returns in place of an equilibrium is finite, and would be scored as right.
    assert bool(model(x).isfinite().all())
    found = evaluate(model, Classification(2), data)
    assert found.metrics["accuracy"] == 0.5
    assert found.confusion is not None
    assert found.confusion.tolist() == [[2, 0], [0, 0]]
    assert (found.missed, found.nonfinite, found.status["NONFINITE"]) == (2, 0, 2)
    sound = evaluate(model, Classification(2), data.select_rows([0, 2]))
    assert found.metrics["loss"] == pytest.approx(sound.metrics["loss"])
    only = evaluate(model, Classification(2), data.select_rows([1, 3]))
    assert (only.metrics["accuracy"], only.metrics["loss"]) == (0.0, None)


def test_evaluation_counts_outputs_that_are_not_finite() -> None:
    x = torch.tensor([[1.0], [math.nan], [-1.0], [1.0]])
    data = Dataset("own", "test", "arrays", ("a", "b"), (1,), x, torch.tensor([1, 1, 0, 0]))
    found = evaluate(nn.Identity(), BinaryRegression(), data)
    assert found.nonfinite == found.to_dict()["nonfinite"] == 1
    assert found.metrics["accuracy"] == 0.5
