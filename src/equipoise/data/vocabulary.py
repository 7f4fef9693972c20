"""The tokens of a text (words, characters or bytes) and their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

__all__ = ["TOKENS", "Tokens", "Vocabulary", "split_text"]

Tokens = Literal["words", "characters", "bytes"]
TOKENS: tuple[Tokens, ...] = get_args(Tokens)
UNKNOWN, END = "<unk>", "<eos>"
BYTES = tuple(f"{byte:02x}" for byte in range(256))  # their names


def split_text(content: bytes, tokens: Tokens) -> Sequence[str]:
    """Return the tokens of a text, or raise `ValueError` with what is wrong with it.

    Words are separated by blanks, and each line ends in `<eos>` (Mikolov et al., 2010). Characters
    are those of Unicode, the ends of lines among them. Bytes come as the characters of Latin-1, a
    string being much smaller than a list.

    Args:
        content: The text, in UTF-8 unless its tokens are bytes.
        tokens: What to split it into.
    """
    if tokens == "bytes":
        if not content:
            raise ValueError("is empty")
        return content.decode("latin-1")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not text in UTF-8 (byte {error.start}); convert it, or read it with the option "
            "tokens = 'bytes'"
        ) from error
    if "\0" in text:
        raise ValueError("is not text: it holds zero bytes")
    if not text.strip():
        raise ValueError("holds no words")
    if tokens == "characters":
        return text.replace("\r\n", "\n")
    # Lines end at line feeds only: splitlines would also cut at rarer characters within them.
    return [word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), END)]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their numbers.

    Args:
        tokens: What they are.
        names: The tokens, in the order of their numbers.
    """

    tokens: Tokens
    names: tuple[str, ...]

    @classmethod
    def learn(
        cls, tokens: Tokens, pieces: Sequence[str], max_size: int | None = None
    ) -> Vocabulary:
        """Return the tokens of a text in the order in which they first appear.

        `<unk>` stands for all others, and `<eos>` is a word, too. Bytes are always all 256.

        Args:
            tokens: What they are.
            pieces: The tokens of the text.
            max_size: How many to know at most, `<unk>` among them: the most frequent ones, the
                earlier of two that are equally frequent.
        """
        if tokens == "bytes":
            return cls(tokens, BYTES)
        always = (END, UNKNOWN) if tokens == "words" else (UNKNOWN,)
        counts = Counter(pieces)
        if max_size is None or len(counts.keys() | set(always)) <= max_size:
            return cls(tokens, tuple(dict.fromkeys([*counts, *always])))
        ranked = sorted((name for name in counts if name not in always), key=lambda n: -counts[n])
        kept = {*ranked[: max(max_size - len(always), 0)], *always}
        return cls(tokens, tuple(n for n in dict.fromkeys([*counts, *always]) if n in kept))

    def encode(self, pieces: Sequence[str]) -> Tensor:
        """Return the numbers of tokens, int64 of shape (tokens,).

        Args:
            pieces: The tokens; those that are not known are `<unk>`.
        """
        if self.tokens == "bytes":
            content = np.frombuffer("".join(pieces).encode("latin-1"), dtype=np.uint8)
            return torch.from_numpy(content.astype(np.int64))
        numbers = {name: number for number, name in enumerate(self.names)}
        unknown = numbers.get(UNKNOWN)
        if unknown is None:
            strange = next((piece for piece in pieces if piece not in numbers), None)
            if strange is not None:
                raise ValueError(f"{strange!r} is not in the vocabulary, which has no {UNKNOWN}")
            unknown = 0
        return torch.from_numpy(
            np.fromiter((numbers.get(p, unknown) for p in pieces), np.int64, count=len(pieces))
        )

    def split_prompt(self, content: bytes) -> Sequence[str]:
        """Return the tokens of a text that is to be continued.

        The end of its last line is left out, so that the line may be continued.

        Args:
            content: The text, as of `split_text`.
        """
        if self.tokens == "words":
            return split_text(content.strip(), self.tokens)[:-1]
        return split_text(content.removesuffix(b"\n") or content, self.tokens)

    def find_unknown(self, pieces: Sequence[str]) -> list[str]:
        """Return the tokens that it does not know, each once; bytes are all known.

        Args:
            pieces: The tokens.
        """
        known = set() if self.tokens == "bytes" else set(self.names)
        return [piece for piece in dict.fromkeys(pieces) if known and piece not in known]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of the tokens with these numbers.

        Args:
            numbers: The numbers.
        """
        names = [self.names[number] for number in numbers]
        if self.tokens == "bytes":
            return bytes.fromhex("".join(names)).decode("utf-8", errors="replace")
        if self.tokens == "characters":
            return "".join(names)
        lines = " ".join(names).split(END)
        return "\n".join(line.strip(" ") for line in lines)
