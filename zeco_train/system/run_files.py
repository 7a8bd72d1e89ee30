"""File names in a run's folder that several packages use."""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
