"""Published files, downloaded on request and accepted only with the right checksum."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from equipoise.core import stop_if_requested, uninterrupted
from equipoise.data.errors import DataError

__all__ = ["Download", "fetch"]

CHUNK = 2**20
TIMEOUT = 30.0


@dataclass(frozen=True)
class Download:
    """A published file.

    Args:
        file: Its name in the data set's folder.
        url: Where it is published.
        digest: Its checksum, `sha256:...` or `md5:...` where only that was published.
        limit: Bytes after which the download is abandoned.
    """

    file: str
    url: str
    digest: str
    limit: int


def fetch(download: Download, folder: Path) -> Path:
    """Download a published file into a folder, whole and checked, or leave the folder as it was.

    The file is written under a temporary name, compared with its checksum, and renamed in one step.

    Args:
        download: What to fetch.
        folder: Where to put it; created if missing.
    """
    target = folder / download.file
    kind, _, expected = download.digest.partition(":")
    checksum = hashlib.new(kind, usedforsecurity=False)
    partial: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(download.url, timeout=TIMEOUT) as answer:
            declared = answer.headers.get("Content-Length", "")
            if declared.isdigit() and int(declared) > download.limit:
                raise DataError(
                    target, f"{download.url} offers {declared} bytes; the limit is {download.limit}"
                )
            with uninterrupted():  # a file is there only if its name is known below
                handle, name = tempfile.mkstemp(prefix=f".{download.file}.", dir=folder)
                partial = Path(name)
            with os.fdopen(handle, "wb") as file:
                done = 0
                while chunk := answer.read(CHUNK):
                    stop_if_requested()
                    done += len(chunk)
                    if done > download.limit:
                        raise DataError(
                            target, f"{download.url} sends more than {download.limit} bytes"
                        )
                    checksum.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        if checksum.hexdigest() != expected:
            raise DataError(
                target,
                f"{download.url} sent a file with the wrong {kind} checksum "
                f"{checksum.hexdigest()}, not {expected}",
            )
        partial.chmod(0o644)  # mkstemp makes files for one user only
        os.replace(partial, target)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        raise DataError(
            target,
            f"could not be fetched from {download.url} ({error}); put the file there by hand",
        ) from error
    finally:
        if partial is not None:
            with uninterrupted():
                partial.unlink(missing_ok=True)
    return target
