"""Names in a run's folder that more than one room needs."""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
