"""Fast settings of the benchmarks' case `model`."""

from __future__ import annotations

TINY = ["model=gla_tiny", "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=32", "heads=[2]"]
QUICK = [*TINY, "device=cpu", "tokens=[32]", "steps=5", "warmup=1", "check_tokens=32", "timeout_seconds=60"]
