"""The version, below everything else: `zeco_train` itself offers the whole project."""

__version__ = "0.3.0"
