import io

import pytest

from equipoise.cli import main
from equipoise.cli.evaluate import _print_classes
from equipoise.core.printable import PrintableStream, printable
from equipoise.engine.progress_line import wrap_line

EVIL = "cat\x1b[31m\x07\r\u202e\udcff"
SHOWN = "cat\\x1b[31m\\x07\\r\\u202e\\udcff"


def test_control_characters_are_shown_by_their_codes() -> None:
    assert printable(f"{EVIL}\n\té漢") == f"{SHOWN}\n\té漢"
    stream = io.StringIO()
    print(EVIL, file=PrintableStream(stream), flush=True)
    assert stream.getvalue() == f"{SHOWN}\n"


def test_commands_print_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from equipoise.runs import presets

    with monkeypatch.context() as patch:  # not for longer: what is imported meanwhile keeps it
        patch.setattr(presets, "list_presets", lambda: {EVIL: "evil"})
        assert main(["list", "presets"]) == 0
    assert capsys.readouterr().out == f"{SHOWN}  evil\n"
    assert main(["report", f"/nowhere/{EVIL}"]) == 2
    assert SHOWN.replace("\\r", " ") in capsys.readouterr().err


def test_table_of_classes_is_aligned_by_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    score = {"precision": 1.0, "recall": 1.0, "f1": 1.0, "count": 3}
    _print_classes({EVIL: score, "dog": score})
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].startswith(SHOWN)
    assert len({len(row) for row in rows}) == 1


def test_long_line_is_wrapped_and_keeps_paths_whole() -> None:
    path = f"/very/long/{'folder-' * 9}/run"
    lines = wrap_line(f"opteq-digits with 1,000 parameters on 9 samples, kept in {path}").split(
        "\n"
    )
    assert len(lines) == 2
    assert lines[1] == f"  {path}"
    assert max(map(len, lines)) <= 80
