"""From tokens to text, as they come: nothing is shown that a later token could still change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.tokenizer import Tokenizer

# What decoders put for bytes that are no character, or not yet: up to three of the four bytes of a character may be
# there, and a decoder may put one mark for each of them.
_MARK = "\ufffd"
_MOST_MARKS = 3
# Tokens before those that are decoded: enough for what a tokenizer does at the border of two words.
CONTEXT = 8
_MOST_IDS = 64


class TextStream:
    """Decodes a sequence token by token. All pieces together are what decoding all tokens together gives.

    Args:
        tokenizer: whose tokens.
        context: those before the first; their text is not repeated.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-CONTEXT:])
        self._given = len(self._decode())

    def add(self, token: int) -> str:
        """The text that this token completes; "" while a character lacks bytes."""
        self._ids.append(token)
        text = self._decode()
        piece = self._give(text, _settled(text))
        if len(self._ids) > _MOST_IDS:
            # The work of a token stays the same, however long the text.
            del self._ids[:-CONTEXT]
            self._given = _settled(self._decode())
        return piece

    def finish(self) -> str:
        """What is left, when no token follows."""
        text = self._decode()
        return self._give(text, len(text))

    def _give(self, text: str, stop: int) -> str:
        piece = text[self._given : stop]
        self._given = max(self._given, stop)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(np.asarray(self._ids, dtype=np.int64))


def _settled(text: str) -> int:
    """How much of a text no later token can change."""
    return len(text) - min(len(text) - len(text.rstrip(_MARK)), _MOST_MARKS)


class StopTexts:
    """Ends a text before the first of some texts in it.

    Args:
        texts: none of them empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is certain to be before any of them; `found` says whether one has come."""
        text = self._held + piece
        places = [(place, stop) for stop in self._texts if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
