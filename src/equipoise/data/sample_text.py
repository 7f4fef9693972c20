"""The text that comes with scikit-learn: English for a first language model, nothing to fetch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from equipoise.data.dataset import Dataset
from equipoise.data.reader import DATASETS, Reader
from equipoise.data.text import Text
from equipoise.data.vocabulary import Tokens

__all__ = ["SampleText"]

HELD_OUT = 0.1


@final
@DATASETS.register("sample-text")
@dataclass(frozen=True)
class SampleText(Reader):
    """The descriptions of scikit-learn's data sets, 43 kB of English; the last tenth is the test.

    Args:
        length: How many tokens a sample has.
        tokens: What the text is split into: `words`, `characters` or `bytes`.
        vocabulary: The tokens to know, in place of those of the training text.
    """

    name = "sample-text"
    summary = "43 kB of English, the descriptions of data sets bundled with scikit-learn."
    bundled = True

    length: int = 32
    tokens: Tokens = "characters"
    vocabulary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._text()  # raises for options that are none

    @classmethod
    def as_trained(cls, about: Dataset) -> dict[str, Any]:
        return Text.as_trained(about)

    def read(self, folder: Path, split: str) -> Dataset:
        import sklearn.datasets  # type: ignore[import-untyped]

        texts = Path(sklearn.datasets.__file__).parent / "descr"
        found = self._text().read(texts, "val" if split == "test" else split)
        return replace(found, name=self.name, split=split)

    def _text(self) -> Text:
        return Text(self.length, self.tokens, holdout=HELD_OUT, vocabulary=self.vocabulary)
