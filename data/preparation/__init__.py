"""Prepares token stores: `preparation.py` reads text, tokenizes it by `pipeline.py`, resumes by `work_folder.py`."""

from data.preparation.pipeline import PrepareOptions
from data.preparation.preparation import Prepared, describe_left_out, prepare_store

__all__ = ["PrepareOptions", "Prepared", "describe_left_out", "prepare_store"]
