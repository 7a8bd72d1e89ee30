"""File names in a run's folder that several packages use."""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
# Present in every run's folder: the settings that its starts share.
IDENTITY_FILE = "identity.json"
