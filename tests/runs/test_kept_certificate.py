"""What `equipoise certify` keeps and prints is true of the weights and lengths that it names."""

from __future__ import annotations

import json
import math

from equipoise.analysis import NetworkBound
from equipoise.cli.certify import accuracy_lines
from equipoise.runs import certified_run
from equipoise.runs.certificate import CertifiedRun, RadiusSummary
from equipoise.runs.certified_run import digest_weights
from equipoise.runs.run_report import write_certificate

LENGTHS = {0.12345678: 0.5, 0.12345679: 0.25, 1000.0: 0.0}


def certified(weights: str | None) -> CertifiedRun:
    bound = NetworkBound(math.inf, (), None, ())
    radii = RadiusSummary("test", 4, 1.0, LENGTHS, LENGTHS, 0.123456, 0.0123, 0)
    return CertifiedRun("somewhere", {}, bound, radii, weights=weights)


def test_kept_certificate_is_about_the_weights_that_were_certified(tmp_path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    old = digest_weights(tmp_path)
    file.write_bytes(b"new")
    assert write_certificate(tmp_path, certified(old))
    assert json.loads((tmp_path / "certificate.json").read_text())["weights"] == old
    assert not write_certificate(tmp_path, certified(None))


def test_weights_that_change_while_they_are_read_are_read_again(tmp_path, monkeypatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    reads = []

    def read(*_: object, **__: object) -> bytes:
        reads.append(file.read_bytes())
        file.write_bytes(b"new")
        return reads[-1]

    monkeypatch.setattr(certified_run, "_find_subject", read)
    subject, weights = certified_run._find_known_subject(
        tmp_path, (), None, None, trust=False, wants_data=False
    )
    assert reads == [b"old", b"new"]
    assert (subject, weights) == (b"new", digest_weights(tmp_path))


def test_lengths_are_told_in_all_their_digits_and_radii_rounded_down() -> None:
    found = certified(None)
    assert list(found.to_dict()["radii"]["certified"]) == ["0.12345678", "0.12345679", "1000"]
    claims = [one.claim for one in found.statements()["network"][1:]]
    assert [claim.split()[-1] for claim in claims] == ["0.12345678", "0.12345679", "1000"]
    said = "\n".join(accuracy_lines(found))
    assert "median radius 0.1234;" in said
    assert "at most 0.013 for" in said
    assert "  0.12345678  " in said
