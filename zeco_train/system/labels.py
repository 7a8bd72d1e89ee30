"""The label of tokens that the loss ignores."""

from __future__ import annotations

# In place of a token's id.
IGNORE_INDEX = -100
