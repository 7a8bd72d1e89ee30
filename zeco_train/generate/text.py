"""Streaming detokenisation: returns only text that no later token can change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.tokenizer import Tokenizer

# Replacement character for invalid or incomplete UTF-8. Up to three of a character's four bytes may be present, and a
# decoder may emit one mark for each.
_MARK = "\ufffd"
_MOST_MARKS = 3
# Preceding tokens decoded as context: enough for a tokenizer's treatment of word boundaries.
CONTEXT = 8
_MOST_IDS = 64


class TextStream:
    """Decodes a sequence token by token. The concatenated pieces equal the decoding of all tokens at once.

    Args:
        tokenizer: of the tokens.
        context: tokens before the first; their text is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-CONTEXT:])
        self._given = len(self._decode())

    def add(self, token: int) -> str:
        """The text completed by this token; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._decode()
        piece = self._give(text, _settled(text))
        if len(self._ids) > _MOST_IDS:
            # Bounds the work per token, however long the text.
            del self._ids[:-CONTEXT]
            self._given = _settled(self._decode())
        return piece

    def finish(self) -> str:
        """The remaining text, after the last token."""
        text = self._decode()
        return self._give(text, len(text))

    def _give(self, text: str, stop: int) -> str:
        piece = text[self._given : stop]
        self._given = max(self._given, stop)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(np.asarray(self._ids, dtype=np.int64))


def _settled(text: str) -> int:
    """Length of the prefix of a text that no later token can change."""
    return len(text) - min(len(text) - len(text.rstrip(_MARK)), _MOST_MARKS)


class StopTexts:
    """Ends a text before the first stop string.

    Args:
        texts: the stop strings, not empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is certainly before any stop string; sets `found` when one occurs."""
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
        """The text held back, after the last piece."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
