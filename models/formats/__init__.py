"""Formats of language models in fla and transformers, one file each; `models.formats.format_registry` has the list."""
