"""Reads and writes Hugging Face folders with the models of `models.formats`."""
