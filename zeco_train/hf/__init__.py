"""Folders as Hugging Face's libraries have them, with the GLA model of flash-linear-attention: written and read."""
