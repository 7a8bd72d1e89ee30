"""ZeCO-Train: exact long-context training of gated linear attention models with sequence parallelism."""

__version__ = "0.1.0"
