"""Columns of tables from the file to the prediction: categories, missing cells, units, order."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from equipoise.cli import main
from equipoise.data import DATASETS, DataError, load_data
from equipoise.data.errors import TableWarning
from equipoise.engine.inputs import read_inputs
from equipoise.runs import open_run
from equipoise.runs.samples import load_part, load_samples
from equipoise.runs.sections import DataConfig

BASE = 1_700_000_000  # of which float32 keeps multiples of 128


def write(path: Path, titles: list[str], rows: list[list[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([titles, *rows])


def make_rows(count: int, seed: int) -> list[list[object]]:
    """A time, a colour and a size; the price follows from time and colour, and so does the kind."""
    random = np.random.default_rng(seed)
    rows: list[list[object]] = []
    for _ in range(count):
        late, colour = random.uniform(0, 60), random.choice(["blue", "green", "red"])
        price = 1e9 + 0.5 * late + (20 if colour == "red" else 0)
        kind = "dear" if price > 1e9 + 20 else "cheap"
        rows.append([BASE + late, str(colour), random.normal(), price, kind])
    return rows


TITLES = ["time", "colour", "size", "price", "kind"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for seed, (split, count) in enumerate((("train", 160), ("test", 40))):
        write(tmp_path / "data" / f"{split}.csv", TITLES, make_rows(count, seed))
    return tmp_path


def train(folder: Path, *settings: str) -> Path:
    words = ["data.name=csv", "data.standardize=true", "train.epochs=15", "train.batch=20"]
    where = ["--data-root", str(folder / "data"), "--output", str(folder / "run"), "--quiet"]
    model = ["model.name=opteq-table", "model.options.width=16", "model.options.hidden=16"]
    assert main(["train", "digits", *model, *words, *settings, *where]) == 0
    return folder / "run"


def test_encoded_columns_are_those_of_scikit_learn(folder: Path) -> None:
    options = {"exclude": ("price",)}
    data = DataConfig("csv", str(folder / "data"), options=options, holdout=0.25, standardize=True)
    samples = load_samples(data)
    with (folder / "data" / "test.csv").open() as file:
        test = list(csv.DictReader(file))
    with (folder / "data" / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Held out are the last ones of a fixed order.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:120].tolist()
    numbers = np.array([[float(rows[i]["time"]), float(rows[i]["size"])] for i in order])
    scaler = StandardScaler().fit(numbers)
    one_hot = OneHotEncoder().fit([[rows[i]["colour"]] for i in order])
    scaled = scaler.transform([[float(row["time"]), float(row["size"])] for row in test])
    colours = one_hot.transform([[row["colour"]] for row in test]).toarray()
    expected = np.c_[scaled[:, :1], colours, scaled[:, 1:]]
    np.testing.assert_allclose(samples.test.x.numpy(), expected, atol=1e-6)
    assert samples.test.encoding.name_features(samples.test.columns) == (
        "time",
        "colour=blue",
        "colour=green",
        "colour=red",
        "size",
    )


def test_prices_are_learnt_in_units_of_their_spread_and_told_in_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(folder, 'data.options={targets=["price"], exclude=["kind"]}')
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["r2"] > 0.9
    # Other order, another column, no price: columns are found by name.
    rows = make_rows(40, 1)
    turned = [["a note", row[2], row[1], row[0]] for row in rows]
    write(folder / "new.csv", ["note", "size", "colour", "time"], turned)
    assert main(["predict", str(run), str(folder / "new.csv")]) == 0
    found = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    errors = np.array([float(each["price"]) for each in found]) - [row[3] for row in rows]
    assert len(found) == 40
    assert np.abs(errors).mean() < 4  # of prices that vary by 13 about a thousand million
    # What is predicted for the file is what is scored.
    assert scores["mae"] == pytest.approx(np.abs(errors).mean(), abs=1e-3)


def test_run_keeps_categories_and_refuses_others_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(folder, 'data.options={exclude=["price"]}', "train.epochs=1")
    assert open_run(run).about.encoding.columns[1].categories == ("blue", "green", "red")
    (folder / "data" / "train.csv").unlink()  # the run knows all it needs
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    for content, sentence in {
        "time,colour,size\n1,mauve,1\n": "row 2, column 'colour' is 'mauve', a category that the",
        "time,colour,size\n1,,1\n": "row 2, column 'colour' is missing; data.impute",
        "time,colour,size\n,red,1\n": "row 2, column 'time' is missing; data.impute",
        "time,colour,size\n1,red,big\n": "row 2, column 'size' is 'big', not a finite number",
        "time,size\n1,1\n": "has no column 'colour'; the model was trained on time, colour, size",
        "1,red,1,0\n2,red,2,0\n": "has 4 columns without names",
    }.items():
        (folder / "new.csv").write_text(content)
        assert main(["predict", str(run), str(folder / "new.csv")]) == 2
        error = capsys.readouterr().err
        assert sentence in " ".join(error.split()), error


@pytest.mark.parametrize(("impute", "size"), [("mean", 2.5), ("median", 2.0)])
def test_missing_cells_are_filled_by_statistics_of_training_rows(
    tmp_path: Path, impute: str, size: float
) -> None:
    train = "1,red,0\n2,red,1\n2,blue,0\n5,,1\nNA,red,0\n"
    (tmp_path / "train.csv").write_text("size,colour,y\n" + train)
    (tmp_path / "test.csv").write_text("size,colour,y\n?,blue,0\n100,mauve,1\n")
    with pytest.raises(DataError, match=r"train.csv: row 6, column 'size' is missing; data.impute"):
        load_samples(DataConfig("csv", str(tmp_path)))
    with pytest.warns(TableWarning, match=r"row 3, column 'colour' is 'mauve'.*'red' stands for"):
        found = load_samples(DataConfig("csv", str(tmp_path), impute=impute))
    assert found.train.x.tolist()[3:] == [[5, 0, 1], [size, 0, 1]]
    assert found.test.x.tolist() == [[size, 1, 0], [100, 0, 1]]


def test_category_that_says_that_nothing_is_known_is_missing(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    train = "red,NA,0\nred,eu,1\nblue,eu,0\nNA,NA,1\nred,eu,1\n"
    (data / "train.csv").write_text("colour,region,y\n" + train)
    (data / "test.csv").write_text("colour,region,y\nnull,NA,0\n?,eu,1\nblue,eu,0\n")
    config = DataConfig("csv", str(data), options={"categories": ("region",)})
    with pytest.raises(DataError, match=r"train.csv: row 5, column 'colour' is missing; data.imp"):
        load_samples(config)
    # North America is a region, since the column is named as one of categories.
    words = ['data.options={categories=["region"]}', "data.impute=mean", "train.epochs=1"]
    where = ["--data-root", str(data), "--output", str(run), "--quiet"]
    model = ["model.name=opteq-table", "data.name=csv", "train.batch=5"]
    assert main(["train", "digits", *model, *words, *where]) == 0
    opened = open_run(run)
    expected = [[0, 1, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1]]
    assert opened.about.encoding.columns[0].categories == ("blue", "red")
    assert opened.about.encoding.columns[1].categories == ("NA", "eu")
    samples = load_samples(opened.config.data)
    assert samples.train.x.tolist()[3] == [0, 1, 1, 0]
    assert samples.test.x.tolist() == expected
    # The run alone knows it too, where a file is read to predict or without that of training.
    new = read_inputs(
        [data / "test.csv"],
        shape=(4,),
        columns=opened.about.columns,
        encoding=opened.about.encoding,
    )
    assert [sample.tolist() for _, sample in new] == expected
    (data / "train.csv").unlink()
    kept = opened.config.data.options | DATASETS["csv"].as_trained(opened.about)
    part = replace(opened.config.data, options=kept)
    assert load_part(part, "test", opened.about.encoding).x.tolist() == expected


def test_missing_numbers_of_arrays_are_refused_or_filled(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=[[1.0, 2], [np.nan, 4], [3, 6]], y=[0, 1, 0])
    np.savez(tmp_path / "test.npz", x=[[np.nan, 1.0]], y=[0])
    with pytest.raises(DataError, match=r"row 2, column '1' is missing"):
        load_samples(DataConfig("npz", str(tmp_path)))
    found = load_samples(DataConfig("npz", str(tmp_path), impute="mean"))
    assert found.train.x.tolist() == [[1, 2], [2, 4], [3, 6]]
    assert found.test.x.tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ("a,b,y\n1,2,0\n2,x,1\n3,4,0\n", {}, "row 3, column 'b' is 'x', not a finite number"),
        (",a,y\n0,5,0\n1,6,1\n2,7,0\n", {}, "column '' counts the rows, which is no feature"),
        ("id,a,y\n1,5,0\n2,6,1\n3,7,0\n", {}, "column 'id' counts the rows, which"),
        ("id,a,y\n7,5,0\n4,6,1\n10,7,0\n", {}, "column 'id' counts the rows in steps of 3"),
        ("a,CustomerId,y\n4,8,0\n6,4,1\n5,0,0\n", {}, "column 'CustomerId' counts the rows in"),
        ("d,y\n2021-03-04,0\n2021-03-04,1\n", {}, "'2021-03-04', a date; turn it into a number"),
        ("name,y\nann,0\nbob,1\neve,0\n", {}, "column 'name' has 3 different texts in 3 rows"),
        ("p;y\n1,5;0\n2,5;1\n2,5;1\n", {}, "row 2, column 'p' is '1,5', not a number as Python"),
        ("1,5;0\n2,5;1\n", {}, "has '1,5' in its first row, a number with a comma"),
        ("1,x;0\n2,x;1\n", {}, "has commas and semicolons in its first row"),
        ("a,y\n1,5,0\n2,5,1\n", {}, "3 columns in row 2; 2 expected (if its numbers have decimal"),
        ("red,1,0\nblue,2,1\nblue,1,1\n", {}, "cannot be told whether it names the columns"),
        ("a,y\n1,0\n", {"exclude": ("b",)}, "has no column 'b'"),
        ("a,b,y\n1,2,0\n", {"exclude": ("a",), "columns": ("a",)}, "CSV.exclude must not name"),
    ],
)
def test_column_that_is_hardly_meant_so_is_refused(
    content: str, options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "train.csv").write_text(content)
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        load_data("csv", root=tmp_path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "options", "rows", "columns"),
    [
        ("\ufeffa;on;y\n1;True;0\n2;False;1\n3;True;1\n", {}, [1, 0, 1], ("a", "on")),
        ("a\ton\ty\n1\tTrue\t0\n2\tFalse\t1\n3\tTrue\t1\n", {}, [1, 0, 1], ("a", "on")),
        # Without titles: 'red' stands below again.
        ("1,red,0\n2,blue,1\n3,red,0\n", {}, [1, 0, 1], ()),
        ("a,code,y\n1,30,0\n2,7,1\n3,7,1\n", {"categories": ("code",)}, [1, 1, 0], ("a", "code")),
        ("a,id,y\n1,0,0\n1,1,0\n1,2,1\n", {"exclude": ("id",)}, [1], ("a",)),
    ],
)
def test_columns_are_read_as_they_are_meant(
    content: str,
    options: dict[str, object],
    rows: list[float],
    columns: tuple[str, ...],
    tmp_path: Path,
) -> None:
    (tmp_path / "train.csv").write_text(content, encoding="utf-8")
    table = load_data("csv", root=tmp_path, **options)
    assert (len(table), table.x[0].tolist(), table.columns) == (3, rows, columns)


def test_truth_is_one_category_however_programs_write_it(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,on,y\n1,TRUE,True\n2,False,false\n3,true,TRUE\n")
    (tmp_path / "test.csv").write_text("a,on,y\n1,True,FALSE\n")
    table = load_data("csv", root=tmp_path)
    assert table.x.tolist() == [[1, 0, 1], [2, 1, 0], [3, 0, 1]]
    assert (table.classes, table.y.tolist()) == (("false", "true"), [1, 0, 1])
    test = load_data("csv", "test", root=tmp_path)
    assert (test.x.tolist(), test.y.tolist()) == ([[1, 0, 1]], [0])


@pytest.mark.parametrize("column", ["a", "y"])
def test_names_that_differ_in_capitals_are_told(column: str, tmp_path: Path) -> None:
    rows = [["x", "p"], ["x", "q"], ["x", "p"], ["x", "q"]]
    for row, name in zip(rows, ("Red", "red", "Red", "blue"), strict=True):
        row[column == "y"] = name
    write(tmp_path / "train.csv", ["a", "y"], rows)
    sentence = f"column '{column}' has 'Red' and 'red', which count as different; write them alike"
    with pytest.warns(TableWarning, match=re.escape(sentence)):
        load_data("csv", root=tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_table_is_read_in_the_encoding_that_its_mark_names(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("größe,y\n1,ä\n2,b\n", encoding=encoding)
    table = load_data("csv", root=tmp_path)
    assert (table.columns, table.classes, table.y.tolist()) == (("größe",), ("b", "ä"), [1, 0])


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("latin-1", "is not text in UTF-8 (byte 0xe4 in line 2); save it as CSV in UTF-8"),
        ("utf-16-le", "holds zero bytes, as UTF-16 without its mark does; save it as CSV in UTF-8"),
    ],
)
def test_table_in_other_bytes_is_refused(encoding: str, reason: str, tmp_path: Path) -> None:
    text = "a,y\n1,ä\n2,b\n" if encoding == "latin-1" else "a,y\n1,0\n2,1\n"
    (tmp_path / "train.csv").write_text(text, encoding=encoding)
    with pytest.raises(DataError, match=re.escape(reason)):
        load_data("csv", root=tmp_path)


@pytest.mark.parametrize(
    ("labels", "options", "name"),
    [
        (["7", "3", "7.0"], {}, "the label"),
        (["cheap", "dear", "dear"], {}, "the label"),
        (["0.5", "1.5", "2.5"], {"targets": ("y",)}, "'y'"),
    ],
)
def test_feature_that_equals_what_is_to_be_predicted_is_told(
    labels: list[str], options: dict[str, object], name: str, tmp_path: Path
) -> None:
    rows = [[i**2, label, label] for i, label in enumerate(labels * 4)]
    write(tmp_path / "train.csv", ["a", "b", "y"], rows)
    sentence = f"train.csv: column 'b' equals {name} in all 12 training rows; leave it out unless"
    with pytest.warns(TableWarning, match=re.escape(sentence)):
        load_data("csv", root=tmp_path, **options)
    rows[4][1] = labels[0]
    write(tmp_path / "train.csv", ["a", "b", "y"], rows)
    load_data("csv", root=tmp_path, **options)  # almost is not all


def test_columns_of_another_file_are_found_by_name_or_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b,y\n1,2,0\n3,4,1\n")
    (tmp_path / "test.csv").write_text("note,y,b,a\nx,1,20,10\n")
    test = load_data("csv", "test", tmp_path)
    assert (test.x.tolist(), test.y.tolist(), test.columns) == ([[10, 20]], [1], ("a", "b"))
    for content, reason in {
        "a,y\n1,0\n": "has no column 'b'; its columns are a, y",
        "a,b\n1,0\n": "has no column 'y'; its columns are a, b",
        "1,0\n": "test.csv: has 2 columns and train.csv 3",
    }.items():
        (tmp_path / "test.csv").write_text(content)
        with pytest.raises(DataError, match=reason):
            load_data("csv", "test", tmp_path)


def test_scale_of_tiny_huge_and_constant_columns(tmp_path: Path) -> None:
    rows = [[1e-30 * i, 1e30 * i, 0.1, BASE + 1e-3 * i, i % 2] for i in range(10)]
    write(tmp_path / "train.csv", ["tiny", "huge", "constant", "late", "y"], rows)
    write(tmp_path / "test.csv", ["tiny", "huge", "constant", "late", "y"], [[0, 0, 9, BASE, 0]])
    found = load_samples(DataConfig("csv", str(tmp_path), standardize=True))
    np.testing.assert_allclose(found.train.x.std(0, correction=0), [1, 1, 0, 1], rtol=1e-3)
    # Weights behind a column that never varied are as they were drawn: they get nothing.
    assert found.test.x[0, 2] == 0
