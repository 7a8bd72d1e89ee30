"""Formats of language models in fla and transformers, one file each; `models.formats.registry` has the list."""
