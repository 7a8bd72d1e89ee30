"""Formats of further classes for models of a mixer, beside `Mixer.fla`: hybrids in transformers itself."""
