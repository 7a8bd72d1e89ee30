"""Labels that do not count."""

from __future__ import annotations

# In place of a token's id.
IGNORE_INDEX = -100
