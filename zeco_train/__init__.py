"""ZeCO-Train: exact long-context training of gated linear attention models with sequence parallelism."""

__version__ = "0.3.0"
