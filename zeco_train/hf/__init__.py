"""Reads and writes Hugging Face folders with the models of flash-linear-attention."""
