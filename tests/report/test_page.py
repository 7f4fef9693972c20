from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import itertools
import math
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from made_up_run import HARM, hostile, masks, run
from PIL import Image

from equipoise.report import Mistake, RunReport, ShownSample, SolvePath, Survey, render_report
from equipoise.report.chart import Rule
from equipoise.report.curve import average, read_column, thin
from equipoise.report.format import format_duration, format_number, format_power
from equipoise.report.histogram import Histogram, bin_edges, draw_histogram
from equipoise.report.training import score_charts

VOID = {"meta", "img", "link", "br", "hr", "input"}
ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "section",
        "div",
        "h1",
        "h2",
        "h3",
        "p",
        "b",
        "span",
    ),
    *(
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "figure",
        "figcaption",
        "img",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    ),
    *("svg", "g", "path", "defs", "use", "text", "rect", "circle", "clippath"),
}


class Page(HTMLParser):
    """Reads a page and complains about whatever is not nested properly."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data):
        if data.strip():
            self.text.append((self.open[-1], data.strip()))

    def headings(self) -> list[str]:
        return [text for tag, text in self.text if tag in ("h2", "h3")]

    def words(self) -> list[str]:
        return [text for _, text in self.text]


def assert_sealed(source: str) -> Page:
    """Nothing runs, nothing is fetched, and the policy allows no more than the page needs."""
    page = Page(source)
    assert {tag for tag, _ in page.tags} <= ALLOWED
    assert sum(tag == "style" for tag, _ in page.tags) == 1
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(names) == len(set(names))
    for tag, attributes in page.tags:
        for key, value in attributes.items():
            assert not key.startswith("on")
            assert key not in (
                "style",
                "srcset",
                "action",
                "formaction",
                "background",
                "ping",
                "srcdoc",
            )
            if key == "src":
                assert tag == "img"
                assert re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", value)
            elif key == "href":
                assert value[0] == "#"
                assert value[1:] in names
            elif key not in ("alt", "aria-label"):  # which are text
                assert "//" not in value
                assert all(name in names for name in re.findall(r"url\(#(.*?)\)", value))
                assert len(re.findall(r"url\(", value)) == len(re.findall(r"url\(#", value))
    metas = {
        attributes.get("http-equiv") or attributes.get("name"): attributes.get("content")
        for tag, attributes in page.tags
        if tag == "meta"
    }
    style = source[source.index("<style>") + 7 : source.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert metas["Content-Security-Policy"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    assert metas["referrer"] == "no-referrer"
    assert not re.search(r"url\(|@import|@font-face", style)
    assert source.isprintable() or not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", source
    )
    source.encode()
    return page


@pytest.fixture(scope="module")
def ordinary() -> str:
    return render_report(run(samples=masks(), ignore=255))


def test_page_shows_what_the_run_did_in_order(ordinary: str) -> None:
    page = assert_sealed(ordinary)
    assert page.headings() == [
        *(
            "Training",
            "Loss",
            "Accuracy",
            "Learning rate, gradient and throughput",
            "Learning rate",
            "Gradient norm",
            "Throughput",
        ),
        *("Solver", "Solver steps", "Residuals", "Operator norms"),
        *("Solves of 3 of 10\u202f000 test samples", "Steps of each sample"),
        "Residual of each sample",
        *(
            "How solves ended",
            "Training, forward",
            "Training, backward",
            "Test",
            "Confusion matrix",
            "Misclassified samples",
            "Samples",
        ),
        *("The equilibrium of one sample", "Residual", "Objective", "Configuration", "Environment"),
    ]
    words = page.words()
    for expected in (
        *(
            "mnist with opteq-mnist",
            "16 November 2026, 15:49 UTC, data in /data/mnist",
            "99.17\u202f%",
            "test accuracy",
            "samples that missed the tolerance",
            "of 10\u202f000 in the test set",
        ),
        *(
            "1\u202fh 2\u202fmin",
            "5 epochs, 400 steps, stopped early",
            "114\u202f666",
            "12\u202f000\u00a0extractor",
            "skipped steps",
        ),
        *(
            "equilibrium.1",
            "equilibrium.2",
            "norm 1",
            "tolerance 0.001",
            "490\u202f000",
            "class 3",
            "103",
            "93.6\u202f%",
        ),
        *(
            "model.options",
            "opteq-mnist",
            "[0.1307]",
            '""',
            "equipoise train mnist",
            "platform",
            "The map is a contraction.",
        ),
    ):
        assert expected in words


@pytest.mark.parametrize(("limit", "told"), [(1.0, {"norm 1"}), (0.5, {"norm 0.5"}), (None, set())])
def test_page_draws_the_limit_of_norms_only_where_there_is_one(
    limit: float | None, told: set[str]
) -> None:
    report = run()
    epochs = [{**line, "norm_limit": limit} for line in report.epochs]
    page = render_report(dataclasses.replace(report, epochs=epochs))
    assert "Operator norms" in page
    assert set(re.findall(r"norm [\d.]+(?=<)", page)) == told


def test_page_shows_mistakes_with_truth_prediction_and_confidence(ordinary: str) -> None:
    words = Page(ordinary).words()
    where = words.index("Misclassified samples")
    assert words[where + 1].startswith("1 of 3 of 10\u202f000 test samples (33.3\u202f%).")
    shown = ["truth class 7", "prediction class 1, 73.5\u202f%", "sample 17"]
    assert words[where + 2 : where + 5] == shown
    right = render_report(run(survey=Survey(3, 3, "test", wrong=0)))
    assert "None of 3 test samples." in Page(right).words()
    # samples that are no images are told in a table, the others in pictures
    table = Survey(3, 3, "test", wrong=1, mistakes=[Mistake(17, "benign", "malignant", 0.735)])
    words = Page(render_report(run(survey=table))).words()
    where = words.index("confidence")
    assert words[where + 1 : where + 5] == ["17", "benign", "malignant", "73.5\u202f%"]


def test_page_names_the_shown_sample_and_the_solver_of_its_path(ordinary: str) -> None:
    words = Page(ordinary).words()
    assert "prediction class 1 (73.5 %)" in words
    assert (
        "The path below is drawn by fixed_point, down to a residual of 1e-06. The model itself "
        "takes 5 steps of Anderson." in words
    )


def test_page_scores_each_class() -> None:
    counts = np.array([[8, 2], [4, 6]])
    words = Page(render_report(RunReport("r", classes=["a", "b"], confusion=counts))).words()
    where = words.index("F1")
    assert words[where - 2 : where] == ["recall", "precision"]
    assert words[where + 1 : where + 7] == [
        "a",
        "8",
        "2",
        "80.0\u202f%",
        "66.7\u202f%",
        "72.7\u202f%",
    ]
    many = np.diag(np.full(30, 9))
    many[7, 7:9] = 3, 6
    words = Page(render_report(RunReport("r", confusion=many))).words()
    where = words.index("F1")
    assert words[where + 1 : where + 6] == ["7", "9", "33.3\u202f%", "100.0\u202f%", "50.0\u202f%"]
    assert words[where + 6] == "8"  # the next weakest


@pytest.mark.parametrize(("steps", "told"), [(1.0, True), (1.01, False)])
def test_page_says_when_one_step_is_all_that_solves_take(steps: float, told: bool) -> None:
    report = run(20, 1)
    report = dataclasses.replace(
        report, survey=None, steps=[{**line, "forward_steps": steps} for line in report.steps]
    )
    assert ("within the tolerance after one pass" in render_report(report)) is told


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([3], False),
        ([0, 0, 1], False),
        ([1, 5000], False),
        ([1e-3], True),
        ([1e-3, 1e-3, 2.5e-9], True),
        ([1e-90, 1e90], True),
        ([0.0, 1e-4], True),
    ],
)
def test_histogram_counts_every_value_once(values: list[float], log: bool) -> None:
    known = np.array([value for value in values if value > 0 or not log])
    histogram = Histogram("Residual", {"forward": values}, "residual", log, Rule("1e-3", 1e-3))
    edges = bin_edges(known, histogram)
    assert (np.diff(edges) > 0).all()
    assert len(edges) <= 122
    assert np.histogram(known, edges)[0].sum() == len(known)
    page = draw_histogram(histogram, 0)
    assert ("Not drawn: 1 value" in page) == (len(known) < len(values))


def test_page_is_accessible(ordinary: str) -> None:
    page = Page(ordinary)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= level + 1 for level, later in itertools.pairwise(levels))
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or (
                attributes["role"] == "img" and attributes["aria-label"]
            )
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if tag == "img":
            assert attributes["alt"]
    spoken = [
        attributes["aria-label"]
        for tag, attributes in page.tags
        if tag == "svg" and "aria-label" in attributes
    ]
    assert (
        "Solver steps (steps per solve) by step: forward from 6.034 to 8.959; "
        "backward from 4.011 to 4.986." in spoken
    )


def test_page_colours_follow_the_scheme_of_the_reader() -> None:
    source = render_report(run(40, 1))
    style = source[source.index("<style>") : source.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark", 1)
    assert set(re.findall(r"--line-\d", light)) == set(re.findall(r"(--line-\d):", dark))
    used = set(re.findall(r'(?:fill|stroke)="(.*?)"', source[source.index("<body>") :]))
    assert {"var(--grid)", "var(--muted)", "var(--line-1)"} <= used
    assert all(value in ("none", "currentColor") or value.startswith("var(--") for value in used)


def test_page_of_hostile_input_is_harmless() -> None:
    source = render_report(hostile())
    page = assert_sealed(source)
    assert "<script" not in source
    assert source.count("</style>") == 1
    shown = HARM.replace("\x00", "�").replace("\u202e", "�").replace("\ud800", "�")
    assert ("h1", shown) in page.text  # and says what it was given
    assert ("th", shown) in page.text
    assert "Not drawn: 70 values that are not finite." in page.words()
    assert len(source.encode()) < 1_000_000


def test_page_leaves_out_parts_without_parameters() -> None:
    ordinary = run(20, 1)
    assert ordinary.summary is not None
    counts = {"extractor": 0, "equilibrium": 7, "total": 7}
    summary = {**ordinary.summary, "parameters": counts}
    words = assert_sealed(render_report(dataclasses.replace(ordinary, summary=summary))).words()
    assert "7\u00a0equilibrium" in words


def test_page_of_a_network_without_equilibria_speaks_of_no_tolerance() -> None:
    ordinary = run(20, 1)
    assert ordinary.summary is not None
    test = {**ordinary.summary["test"], "missed": 0, "status": {}}
    summary = {**ordinary.summary, "test": test}
    words = assert_sealed(render_report(dataclasses.replace(ordinary, summary=summary))).words()
    assert "test accuracy" in words
    assert "samples that missed the tolerance" not in words


@pytest.mark.parametrize(
    ("skipped", "note"),
    [
        ((3, 7), "Not drawn: 2 steps that training skipped."),
        ((3,), "Not drawn: 1 step that training skipped and 1 value that is not finite."),
        ((), "Not drawn: 2 values that are not finite."),
    ],
)
def test_page_says_which_losses_are_missing_because_steps_were_skipped(
    skipped: tuple[int, ...], note: str
) -> None:
    ordinary = run(20, 1)
    steps = [dict(line) for line in ordinary.steps]
    for index in (3, 7):
        steps[index] |= {"loss": None, "skipped": index in skipped}
    page = assert_sealed(render_report(dataclasses.replace(ordinary, steps=steps)))
    assert note in page.words()


@pytest.mark.parametrize("value", ["", {}, [], None, math.nan, -1, "1"], ids=repr)
def test_page_copes_with_strange_values_anywhere(value: object) -> None:
    ordinary = run(2, 2)
    first, second = ordinary.steps
    steps = [first, {**dict.fromkeys(second, value), "step": 1}, dict.fromkeys(second, value)]
    epochs = [{**dict.fromkeys(line, value), "kind": "epoch"} for line in ordinary.epochs]
    assert_sealed(
        render_report(
            RunReport(
                "strange",
                steps=steps,
                epochs=epochs,
                summary=dict.fromkeys(ordinary.summary, value),
            )
        )
    )


def test_page_of_a_run_with_nothing_or_one_step() -> None:
    assert assert_sealed(render_report(RunReport("empty"))).headings() == []
    assert assert_sealed(render_report(RunReport("empty", summary={}))).headings() == []
    one = assert_sealed(render_report(RunReport("one", steps=run(1, 1).steps)))
    assert one.headings()[:3] == ["Training", "Loss", "Accuracy"]
    assert (
        sum(tag == "use" for tag, _ in one.tags) >= 8
    )  # a point in each chart, two where there are two lines
    assert "not finished" in one.words()
    assert "Training, forward, logged steps" in one.headings()


def test_page_of_an_unfinished_run_takes_its_last_epoch() -> None:
    words = assert_sealed(render_report(run(summary=None, confusion=None))).words()
    assert {
        "93.00\u202f%",
        "test accuracy",
        "not finished",
        "step 399",
        "5 epochs done",
        "1\u202fmin 0\u202fs",
    } <= set(words)
    assert words[words.index("skipped steps") + 1] == "5"
    assert {"6\u202f350", "50", "6\u202f400"} <= set(words)  # solves of five epochs


@pytest.mark.parametrize(
    ("metric", "value", "heading", "tile"),
    [
        ("miou", 0.6543, "Mean intersection over union", "65.4\u202f%"),
        ("perplexity", 32.51, "Perplexity", "32.51"),
        ("psnr", 29.876, "Peak signal-to-noise ratio", "29.88 dB"),
        ("regret_of_mine", 12345.6, "Regret of mine", "12\u202f346"),
    ],
)
def test_page_shows_the_score_of_any_task(
    metric: str, value: float, heading: str, tile: str
) -> None:
    epochs = [{"epoch": 0, "step": 10, "validation": {metric: value, "loss": 0.5, "samples": 360}}]
    page = assert_sealed(render_report(RunReport("any", epochs=epochs)))
    assert page.headings() == ["Training", "Loss", heading]
    assert tile in page.words()


@pytest.mark.parametrize(
    ("correct", "samples", "tile", "ratio", "spoken"),
    [
        (2500, 2500, "100.0\u202f%", "100.0\u202f%", "100.00"),
        (2499, 2500, "99.9\u202f%", "99.9\u202f%", "99.96"),
        (50_000, 50_000, "100.00\u202f%", "100.0\u202f%", "100.00"),
        (49_999, 50_000, "99.99\u202f%", "99.9\u202f%", "99.99"),
    ],
    ids=["all of few", "one missed of few", "all of many", "one missed of many"],
)
def test_page_says_100_percent_only_of_all(
    correct: int, samples: int, tile: str, ratio: str, spoken: str
) -> None:
    def wrong(size: int) -> np.ndarray:
        counts = np.zeros((size, size), dtype=np.int64)
        counts[0, :2] = correct, samples - correct
        return counts

    scores = {"accuracy": correct / samples, "samples": samples}
    status = {"CONVERGED": correct, "MAX_STEPS": samples - correct}
    report = RunReport(
        "nearly all",
        epochs=[{"epoch": 0, "step": 1, "test": scores}],
        summary={"metric": "accuracy", "test": {**scores, "status": status}},
        confusion=wrong(2),
    )
    page = assert_sealed(render_report(report))
    words = page.words()
    assert words[words.index("test accuracy") + 1] == tile
    tables = [text for tag, text in page.text if tag == "td" and "%" in text]
    assert tables[:3] == [ratio, ratio, "100.0\u202f%"]  # converged, recall, precision
    labels = [attributes.get("aria-label") or "" for _, attributes in page.tags]
    assert f"Accuracy (%) by step: test {spoken}." in labels
    page = assert_sealed(render_report(RunReport("many classes", confusion=wrong(30))))
    (alternative,) = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert f"; {ratio} of samples on the diagonal" in alternative


def test_page_shows_each_equilibrium_in_a_section_of_its_own() -> None:
    solves = [
        SolvePath([1.0, 1e-3], certificate="The map is a contraction.", name="equilibrium.0"),
        SolvePath([1.0, 1e-2], [5.0, 0.1], "It minimises a sum.", name="equilibrium.1"),
    ]
    page = assert_sealed(render_report(RunReport("two", solves=solves)))
    assert page.headings() == [
        "The equilibrium of one sample: equilibrium.0",
        "Residual",
        "The equilibrium of one sample: equilibrium.1",
        "Residual",
        "Objective",
    ]
    assert {"The map is a contraction.", "It minimises a sum."} <= set(page.words())


def test_page_axis_of_nearly_all_names_each_tick_differently() -> None:
    epochs = [
        {"epoch": k, "step": k, "test": {"accuracy": value}}
        for k, value in enumerate((0.99990, 0.99998))
    ]
    page = assert_sealed(render_report(RunReport("axis", epochs=epochs)))
    ticks = [text for tag, text in page.text if tag == "text" and text.startswith(("99.", "100"))]
    assert len(ticks) >= 3
    assert len(set(ticks)) == len(ticks)
    assert "100" not in ticks


@pytest.mark.parametrize(
    "values", [(5e-324, 1e-99), (-1e99, 1e99), (1e-320, 2e-320), (1e99, 1e99), (0.0, 0.0)], ids=repr
)
def test_page_copes_with_extreme_numbers(values: tuple[float, float]) -> None:
    steps = [
        {"step": step, "loss": value, "forward_residual": value, "learning_rate": value}
        for step, value in zip((1, 10**90), values, strict=True)
    ]
    config = {"model": {"options": {"tolerance": 5e-324}}}
    page = assert_sealed(
        render_report(
            RunReport("extreme", steps=steps, config=config, solves=[SolvePath(values, values)])
        )
    )
    assert page.headings()[:2] == ["Training", "Loss"]


def test_page_of_a_huge_run_is_small_and_quick() -> None:
    line = run(2, 1).steps[1]
    generator = np.random.default_rng(0)
    steps = [
        {**line, "step": k, "loss": loss}
        for k, loss in enumerate(generator.lognormal(0, 1, 200_000).tolist())
    ]
    began = time.process_time()
    source = render_report(RunReport("huge", steps=steps))
    assert time.process_time() - began < 15  # 3 on most machines
    assert_sealed(source)
    assert len(source.encode()) < 500_000


def test_page_is_the_same_every_time(ordinary: str) -> None:
    assert render_report(run(samples=masks(), ignore=255)) == ordinary


def test_page_counts_of_many_classes_are_an_image() -> None:
    counts = np.random.default_rng(0).integers(1, 5, (1000, 1000)) + 4000 * np.eye(
        1000, dtype=np.int64
    )
    source = render_report(RunReport("many", confusion=counts))
    page = assert_sealed(source)
    (image,) = images(page)
    assert image.shape == (334, 334, 4)
    assert np.diag(image[..., 3]).min() > 150 > image[0, 1:, 3].max()
    assert len(source.encode()) < 1_000_000


def images(page: Page) -> list[np.ndarray]:
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))))
        for source in sources
    ]


def test_page_masks_have_the_colours_of_their_legend() -> None:
    samples = masks(6, 600, 400)
    page = assert_sealed(
        render_report(
            RunReport("masks", samples=samples, ignore=255, classes=["sky", "road", "tree"])
        )
    )
    found = images(page)
    assert len(found) == 12  # four samples
    image, truth, prediction = found[:3]
    assert image.shape == (200, 134, 3)
    assert (image == samples[0].panels["image"][::3, ::3]).all()
    legend = [attributes["fill"] for tag, attributes in page.tags if tag == "rect"]
    assert [text for tag, text in page.text if tag == "li"] == [
        "sky",
        "road",
        "tree",
        "class 3",
        "does not count",
    ]
    for painted, labels in (
        (truth, samples[0].panels["truth"]),
        (prediction, samples[0].panels["prediction"]),
    ):
        for label, colour in enumerate(legend[:4]):
            assert (painted[labels[::3, ::3] == label] == [*bytes.fromhex(colour[1:]), 255]).all()
        assert (painted[labels[::3, ::3] == 255, 3] == 0).all()


def test_page_of_masks_that_hardly_compress_stays_under_two_megabytes() -> None:
    assert len(render_report(RunReport("noise", samples=masks(9, 512, 512))).encode()) < 1_500_000


def test_thinning_keeps_spikes_and_gaps() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 5000)
    y[[31_234, 77_777]] = 50, -50
    y[50_000:60_000] = np.nan
    kept_x, kept_y = thin(x, y)
    assert len(kept_x) <= 1000
    assert (np.diff(kept_x) > 0).all()
    assert {31_234, 77_777} <= set(kept_x)
    assert np.array_equal(y[kept_x.astype(int)], kept_y, equal_nan=True)
    assert np.isnan(kept_y).sum() >= 40
    assert thin(x[:1000], y[:1000])[0] is not None
    assert len(thin(x[:1000], y[:1000])[0]) == 1000


def test_means_are_means_and_one_spike_spoils_only_its_own() -> None:
    x, y = np.arange(1200.0), np.tile([1.0, 3.0], 600)
    y[600] = 1e90
    mean_x, mean_y = average(x, y)
    assert len(mean_x) == 120
    assert mean_x == pytest.approx(x.reshape(120, 10).mean(axis=1))
    assert np.delete(mean_y, 60) == pytest.approx(2.0)
    assert len(average(x[:20], y[:20])[0]) == 0


def test_columns_take_the_later_of_two_lines_for_a_step() -> None:
    lines = [
        {"step": 2, "a": 1.0},
        {"step": 1, "a": 5.0},
        {"step": 2, "a": 7.0},
        {"step": 3},
        {"step": None, "a": 1.0},
        {"step": 4, "a": None},
    ]
    x, y = read_column(lines, "a")
    assert x.tolist() == [1, 2, 4]
    assert y[:2].tolist() == [5, 7]
    assert math.isnan(y[2])


def test_numbers_are_readable() -> None:
    assert [format_power(value) for value in (1e-3, 2.5e-4, -1e7, 0.0, 1.0, 10.0)] == [
        "10⁻³",
        "2.5·10⁻⁴",
        "-1·10⁷",
        "0",
        "1",
        "10",
    ]
    assert [format_number(value) for value in (0.0, 0.12345, 12345.6, 3e-5, math.nan)] == [
        "0",
        "0.1235",
        "12\u202f346",
        "3·10⁻⁵",
        "\u2013",
    ]
    assert [format_duration(value) for value in (0.25, 59.99, 61.3, 3725, 90000)] == [
        *(
            "0.2\u202fs",
            "1\u202fmin 0\u202fs",
            "1\u202fmin 1\u202fs",
            "1\u202fh 2\u202fmin",
            "1\u202fd 1\u202fh",
        )
    ]


def test_report_refuses_arrays_of_other_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"RunReport\.confusion must be classes x classes; got \(2, 3\)"
    ):
        RunReport("bad", confusion=np.zeros((2, 3)))
    with pytest.raises(
        ValueError,
        match=r"panels\['image'\] must be height x width, or height x width x 3; got \(4, 4, 2\)",
    ):
        ShownSample({"image": np.zeros((4, 4, 2))})
    with pytest.raises(
        ValueError,
        match=r"ShownSample\.panels must have one height and width; got \[\(4, 5\), \(5, 4\)\]",
    ):
        ShownSample({"image": np.zeros((4, 5, 3)), "truth": np.zeros((5, 4))})
    with pytest.raises(
        ValueError,
        match=r"SolvePath\.image must be height x width, or height x width x 3; got \(64,\)",
    ):
        SolvePath([1.0], image=np.zeros(64))


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({}, [20.0, 50.0]),
        ({"kept_epoch": 2}, [20.0]),  # other weights
        ({"test": {"accuracy": 0.9, "samples": 1000}}, [20.0]),  # other samples
        ({"steps": 20}, [20.0]),  # the last epoch was scored: its point is not drawn twice
    ],
)
def test_curve_ends_with_the_scores_of_the_last_weights(
    changed: dict[str, object], steps: list[float]
) -> None:
    scores = {"accuracy": 0.8, "samples": 100}
    epochs = [{"step": 10, "train": {"accuracy": 0.5}}, {"step": 20, "test": scores}]
    last = {"accuracy": 0.9, "samples": 100}
    summary = {"epochs": 5, "kept_epoch": 5, "steps": 50, "test": last, **changed}
    charts = score_charts(RunReport("a run", epochs=epochs, summary=summary))
    lines = next(chart.lines for chart in charts if chart.title == "Accuracy")
    test = next(line for line in lines if line.name == "test")
    assert list(test.x) == steps
    assert test.y[-1] == pytest.approx(90.0 if changed in ({}, {"steps": 20}) else 80.0)
