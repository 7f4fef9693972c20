import tomllib
from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from equipoise.models import create_model
from equipoise.runs import (
    Config,
    DataConfig,
    ModelConfig,
    TaskConfig,
    dump_config,
    list_presets,
    load_config,
    parse_config,
)
from equipoise.runs.toml import parse_value

DIGITS = '[model]\nname = "opteq-digits"\n[data]\nname = "digits"\n'


def write(folder, text):
    path = folder / "my.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("name", list_presets())
def test_preset_is_complete_and_says_how_to_run_it(name):
    from importlib.resources import files

    config = load_config(name)
    header = (
        files("equipoise.runs").joinpath("preset", f"{name}.toml").read_text().partition("\n\n")[0]
    )
    assert f"equipoise train {name} --output DIR" in header
    assert len(list_presets()[name]) > 20
    assert len(config.data.mean) in (0, 1, 3)
    model = create_model(config.model.name, **config.model.options)
    if config.data.size:
        multiple = model.size_multiple
        sides = config.data.size
        assert (
            sides == model.input_shape[1:]
            if multiple is None
            else not any(side % multiple for side in sides)
        )


def test_config_reads_every_type_and_leaves_the_rest_at_defaults(tmp_path):
    text = DIGITS + (
        "size = [8, 8]\nmean = [1]\nstd = [0.5]\ndownload = true\n[train]\nclip = "
        '2\nprecision = "bfloat16"\n'
    )
    config = load_config(write(tmp_path, text))
    assert config.data.size == (8, 8)
    assert config.data.mean == (1.0,)
    assert type(config.data.mean[0]) is type(config.train.clip) is float
    assert config.data.download is True
    assert config.train.precision == "bfloat16"
    assert config == parse_config(tomllib.loads(text), "here")
    assert (
        replace(config, train=Config.__dataclass_fields__["train"].default_factory()).train.epochs
        == 10
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\n" + DIGITS, "trian must be a section, one of .* Did you mean 'train'"),
        (
            DIGITS + "[train]\nepoch = 3",
            "train.epoch must be a setting of train, one of .* Did you mean 'epochs'",
        ),
        (DIGITS + "[train]\nepochs = 3.0", "train.epochs must be a whole number; got 3.0"),
        (DIGITS + "[train]\nepochs = true", "train.epochs must be a whole number; got True"),
        (
            DIGITS + "[train]\nepochs = 0",
            "train.epochs must be a whole number of at least 1; got 0",
        ),
        (DIGITS + "[train]\nclip = false", "train.clip must be a number; got False"),
        (DIGITS + "[train]\nclip = nan", "train.clip must be a finite number; got nan"),
        (DIGITS + f"[train]\nclip = 1{'0' * 400}", "train.clip must be a finite number"),
        (DIGITS + "[train]\ntensorboard = 1", "train.tensorboard must be true or false; got 1"),
        (
            DIGITS + "[train]\nprecision = 'float23'",
            "train.precision must be one of .* Did you mean 'float32'",
        ),
        (DIGITS + "[optimizer]\nbetas = [0.9]", "optimizer.betas must be a list of 2 numbers"),
        (DIGITS + "[optimizer]\nbetas = [0.9, '1']", "optimizer.betas must be a number; got '1'"),
        (DIGITS + "root = 3", "data.root must be text; got 3"),
        (DIGITS + "options = 3", "data.options must be a table; got 3"),
        (
            DIGITS + "options = { x = 3 }",
            "data.options.x must be left out, since 'digits' has no options; got 3",
        ),
        (DIGITS + "size = [8]", "data.size must be a pair .height, width."),
        (
            DIGITS + "size = [8, 0]",
            "data.size must be a pair .height, width. of whole numbers of at least 1",
        ),
        (DIGITS + "mean = [0.5]", "data.mean must have as many numbers as data.std; got 1 and 0"),
        (DIGITS + "mean = [0.5]\nstd = [0]", "data.std must be a positive number"),
        (DIGITS + "holdout = 1", r"data.holdout must be in \[0, 1\)"),
        (DIGITS + "flip = 2", r"data.flip must be in \[0, 1\]"),
        (DIGITS + "samples_per_clas = 1", "Did you mean 'samples_per_class'"),
        (DIGITS + "samples_per_class = -1", "data.samples_per_class must be a whole number of at"),
        (
            DIGITS + "samples_per_class = 1\nsubset = 2",
            "data.samples_per_class must be 0 with data.subset",
        ),
        (DIGITS + "subset = -1", "data.subset must be a whole number of at least 0"),
        (DIGITS + "augment = 'random-resized-crop'", "data.size must be given"),
        (
            DIGITS + "noise = 0.1",
            "data.noise must be 0 for the task 'auto'; got 0.1. Set task.name = 'restoration'",
        ),
        (
            DIGITS + "[train]\npatience = 2",
            "train.patience must be 0 .* early stopping needs held-out samples: set data.holdout",
        ),
        (
            DIGITS + "[task]\nname = 'clasification'",
            "task.name must be one of .* Did you mean 'classification'",
        ),
        (DIGITS + "[task]\nlabel_smoothing = 1", r"task.label_smoothing must be in \[0, 1\)"),
        (
            "[model]\nname = 'opteq-digit'\n[data]\nname = 'digits'",
            "model.name must be one of .* Did you mean 'opteq-digits'",
        ),
        (
            "[model]\nname = 'opteq-digits'\noptions = { tolerence = 1 }\n[data]\nname = 'digits'",
            "model.options.tolerence must be an option of 'opteq-digits', one of",
        ),
        (
            "[model]\nname = 'opteq-digits'\noptions = { alpha = inf }\n[data]\nname = 'digits'",
            "model.options.alpha must be a finite",
        ),
        (
            "[model]\nname = 'opteq-digits'\noptions = { alpha = 2020-01-01 }\n[data]\nname = "
            "'digits'",
            "model.options.alpha must be text",
        ),
        ("[data]\nname = 'digits'", "model must be given"),
        ("model = 3\n[data]\nname = 'digits'", "model must be a table of settings; got 3"),
        ("[model]\n[data]\nname = 'digits'", "model.name must be given"),
        (
            "[model]\nname = 'opteq-digits'\n[data]\nname = 'digit'",
            "data.name must be one of .* Did you mean 'digits'",
        ),
        ("x = 3\nepochs = = 3", r"must be TOML: .*at line 2, column 10"),
        ("extends = 'cifar'", "extends must be one of .* Did you mean 'cifar10'"),
        ("extends = 3", "extends must be one of"),
        ('"a\\nb" = 3\n' + DIGITS, "must be a section, one of"),
        (b"\xff\xfe", "must be text in UTF-8; byte 0 is not"),
        ("#" * (2**20 + 1), "must be a config of at most 1048576 bytes"),
        ("x = " + "[" * 100_000, "must not nest"),
        (DIGITS + "options = " + "[" * 300 + "]" * 300, "data.options must be a table"),
        (
            DIGITS + "[model.options." + ".".join("a" * 10_000) + "]",
            "must not nest lists and tables so deeply",
        ),
    ],
)
def test_config_with_a_mistake_says_where_and_what_in_one_line(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=f"(?i){message}") as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count("my.toml") == 1
    assert "\n" not in str(caught.value)


def test_config_extends_a_preset_table_by_table(tmp_path):
    base = load_config("cifar10")
    text = 'extends = "cifar10"\n[train]\nepochs = 3\n[model]\noptions = { max_steps = 7 }'
    assert load_config(write(tmp_path, text)) == replace(
        base,
        train=replace(base.train, epochs=3),
        model=ModelConfig("opteq-cifar10-162k", {**base.model.options, "max_steps": 7}),
    )


def test_config_may_solve_otherwise_in_evaluation(tmp_path):
    text = 'extends = "digits"\n[model.options]\neval_options = { tolerance = 1e-6 }'
    config = load_config(write(tmp_path, text))
    assert config.model.options["eval_options"] == {"tolerance": 1e-6}
    (tmp_path / "again.toml").write_text(dump_config(config), "utf-8")
    assert load_config(tmp_path / "again.toml") == config
    model = create_model(config.model.name, **config.model.options)
    assert model.equilibrium.eval_options == {"tolerance": 1e-6}


def test_config_of_a_run_folder_is_its_config_file(tmp_path):
    config = load_config("mnist", ["train.epochs=3"])
    (tmp_path / "config.toml").write_text(dump_config(config), "utf-8")
    assert load_config(tmp_path) == load_config(str(tmp_path)) == config


def test_config_source_that_is_nowhere_lists_the_presets(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"config must be a TOML file, the folder of a run or one of .*camvid, .*; got "
        r"'cifar1'. Did you mean 'cifar10'",
    ):
        load_config("cifar1")
    for name, remedy in (
        ("opteq-table", "'opteq-table', the name of a model. Train one with it: equipoise train b"),
        ("svhn-extra", "got 'svhn-extra'."),
        ("csv", "got 'csv', the name of data. Set it in one: equipoise train PRESET data.name=csv"),
    ):
        with pytest.raises(ValueError, match=remedy):
            load_config(name)
    with pytest.raises(ValueError, match=r"nowhere.toml: there is no such file or folder"):
        load_config("nowhere.toml")
    with pytest.raises(ValueError, match=r"must be the folder of a run; it has no config.toml"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("train.epochs=3", "train", "epochs", 3),
        (" train.epochs = 3", "train", "epochs", 3),
        ("train.clip=3", "train", "clip", 3.0),
        ("model.options.norm=project", "model", "options", {"norm": "project"}),
        ("model.options.tolerance=1e-2", "model", "options", {"tolerance": 0.01}),
        (
            "model.options={norm='none', alpha=[0.5]}",
            "model",
            "options",
            {"norm": "none", "alpha": (0.5,)},
        ),
        ("data.root=2024", "data", "root", "2024"),
        ("data.root='a=b'", "data", "root", "a=b"),
        ("data.root=", "data", "root", ""),
        ("data.root=1\ntrain.epochs=2", "data", "root", "1\ntrain.epochs=2"),
        ("data.size=[8, 8]", "data", "size", (8, 8)),
    ],
    ids=str,
)
def test_override_sets_one_value(override, section, name, value):
    before, after = load_config("digits"), load_config("digits", [override])
    assert getattr(getattr(after, section), name) == value
    assert (
        replace(
            after,
            **{
                section: replace(
                    getattr(after, section), **{name: getattr(getattr(before, section), name)}
                )
            },
        )
        == before
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "an override must have the form key=value"),
        ("=3", "an override must have the form key=value"),
        ("train.epochs=abc", "train.epochs must be a whole number; got 'abc'"),
        ("train.epochs=0", "train.epochs must be a whole number of at least 1; got 0"),
        (
            "train.epoch=3",
            "train.epoch must be a setting of train, one of .* Did you mean 'epochs'",
        ),
        ("trian.epochs=3", "trian must be a section, one of .* Did you mean 'train'"),
        (
            "train.epochs.x=3",
            "train.epochs.x must name a setting; train.epochs has no settings inside it; got 'x'",
        ),
        ("train=3", "train must be a table of settings; got 3"),
        (
            "model.options.norm.x=3",
            "model.options.norm.x must be inside a table, which model.options.norm must be; got "
            "'project'",
        ),
        (
            "model.options.tolerence=1",
            "model.options.tolerence must be an option of .* Did you mean 'tolerance'",
        ),
        ("model.options.a.b=1", "model.options.a must be an option of"),
        ("data.root=\udcff", "data.root must be text that UTF-8 can hold"),
        ("train.patience=3", "set data.holdout"),
    ],
    ids=ascii,
)
def test_override_with_a_mistake_is_named(override, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config("cifar10", [override])
    assert str(caught.value).startswith(f"{override}: ")


def test_override_may_repair_what_a_file_lacks(tmp_path):
    path = write(tmp_path, DIGITS + "[train]\npatience = 3\n")
    assert load_config(path, ["data.holdout=0.1"]).train.patience == 3


PLAIN = st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@example(
    root='"\\\x00\x1f\x7f\u0085\U0001f600\r\n',
    value={"a b": {"": ("\x7f",)}},
    epsilon=5e-324,
    size=2**70,
)
@given(
    root=st.text(),
    value=VALUES,
    epsilon=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    size=st.integers(1),
)
def test_config_reads_back_as_it_was_written(root, value, epsilon, size):
    before = load_config("camvid", ["schedule.name=step", "schedule.milestones=[0.5, 3]"])
    config = replace(
        before,
        data=replace(before.data, root=root, size=(size, 8)),
        model=ModelConfig("opteq-digits", {"solver": value}),
        optimizer=replace(before.optimizer, epsilon=epsilon),
    )
    table = tomllib.loads(dump_config(config))
    assert parse_config(table, "here") == config
    assert [list(table[section.name]) for section in fields(config)] == [
        [each.name for each in fields(getattr(config, section.name))] for section in fields(config)
    ]


def test_config_with_an_object_among_its_options_cannot_be_written():
    config = Config(
        ModelConfig("opteq-digits", {"solver": object}), DataConfig("digits"), TaskConfig()
    )
    with pytest.raises(ValueError, match=r"model.options.solver must be text"):
        dump_config(config)


@given(st.text())
def test_override_value_is_toml_or_text(text):
    value = parse_value(text)
    assert value == text or tomllib.loads(f"value = {text}") == {"value": value}
