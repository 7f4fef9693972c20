from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from published import IDX, write_idx

from equipoise.data import DATASETS, DataError, load_data
from equipoise.data.fetch import Download, fetch

CONTENT = gzip.compress(bytes(range(256)) * 10, mtime=0)  # else two workers collect other tests
SHA = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = {"/good": CONTENT, "/page": b"<html>moved</html>", "/endless": b"x" * 10**6}
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return
        if self.path.partition("?")[0] not in {*answers, "/short", "/undeclared"}:
            self.send_error(404)
            return
        body = answers.get(self.path, CONTENT)
        self.send_response(200)
        if self.path != "/undeclared":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:-9] if self.path == "/short" else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as service:
        thread = threading.Thread(target=partial(service.serve_forever, poll_interval=0.01))
        thread.start()
        yield f"http://127.0.0.1:{service.server_port}"
        service.shutdown()
        thread.join()


@pytest.mark.parametrize("digest", [SHA, MD5])
@pytest.mark.parametrize("page", ["good", "undeclared"])
def test_fetch_brings_the_published_file(
    server: str, page: str, digest: str, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    path = fetch(Download("a.gz", f"{server}/{page}", digest, len(CONTENT)), folder)
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("page", "limit", "reason"),
    [
        ("page", 10**6, "wrong sha256 checksum"),
        ("short", 10**6, "wrong sha256 checksum|could not be fetched"),
        ("endless", 10**5, "offers 1000000 bytes; the limit is 100000"),
        ("undeclared", len(CONTENT) - 1, "sends more than"),
        ("absent", 10**6, r"could not be fetched from .*404.*put the file there by hand"),
        ("redirect", 10**6, "could not be fetched"),
    ],
)
def test_fetch_leaves_the_folder_as_it_was_when_something_is_wrong(
    server: str, page: str, limit: int, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "a.gz").write_bytes(b"older")
    with pytest.raises(DataError, match=reason) as caught:
        fetch(Download("a.gz", f"{server}/{page}", SHA, limit), tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "a.gz"))
    assert "\n" not in str(caught.value)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.gz", b"older")]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/closed", "file:///no/such/file"])
def test_fetch_says_so_without_a_network(url: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"could not be fetched from .*; put the file there by hand"
    ):
        fetch(Download("a.gz", url, SHA, 100), tmp_path)
    assert not list(tmp_path.iterdir())


def publish(folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Publish a tiny MNIST under file: addresses; return which ones were asked for."""
    write_idx(folder, "train")
    table = tuple(
        Download(
            f"{name}.gz",
            (folder / f"{name}.gz").as_uri(),
            f"sha256:{hashlib.sha256((folder / f'{name}.gz').read_bytes()).hexdigest()}",
            10**4,
        )
        for name in IDX["train"]
    )
    asked: list[str] = []

    def spy(download: Download, folder: Path) -> Path:
        assert folder == target
        asked.append(download.file)
        return fetch(download, folder)

    monkeypatch.setattr(DATASETS["mnist"], "downloads", {"train": table})
    monkeypatch.setattr("equipoise.data.reader.fetch", spy)
    return asked


def test_load_data_fetches_only_on_request_and_only_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "published").mkdir()
    asked = publish(tmp_path / "published", tmp_path / "mine", monkeypatch)
    with pytest.raises(DataError, match=r"--download, download=True"):
        load_data("mnist", root=tmp_path / "mine")
    assert not asked
    assert not (tmp_path / "mine").exists()
    assert len(load_data("mnist", root=tmp_path / "mine", download=True)) == 5
    assert len(load_data("mnist", root=tmp_path / "mine", download=True)) == 5
    assert asked == [f"{name}.gz" for name in IDX["train"]]


def test_load_data_never_uses_a_file_with_the_wrong_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "published").mkdir()
    publish(tmp_path / "published", tmp_path / "mine", monkeypatch)
    write_idx(tmp_path / "published", "train", packed=False)
    path = tmp_path / "published" / f"{IDX['train'][0]}.gz"
    path.write_bytes(
        gzip.compress((tmp_path / "published" / IDX["train"][0]).read_bytes()[:-1] + b"!")
    )
    with pytest.raises(DataError, match="wrong sha256 checksum"):
        load_data("mnist", root=tmp_path / "mine", download=True)
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_download_table_is_complete(name: str) -> None:
    kind = DATASETS[name]
    assert set(kind.downloads) in (set(), set(kind.splits))
    for download in (file for files in kind.downloads.values() for file in files):
        method, _, digest = download.digest.partition(":")
        assert len(digest) == {"sha256": 64, "md5": 32}[method]
        assert int(digest, 16) > 0
        assert download.url.startswith(("https://", "http://"))
        assert download.url.endswith(download.file)
        assert "/" not in download.file
        assert 0 < download.limit < 10**9
