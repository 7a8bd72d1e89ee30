"""Folders as Hugging Face's libraries have them, with the models of flash-linear-attention: written and read."""
