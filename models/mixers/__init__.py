"""Token mixers, one file each; `models.mixer_registry` lists them."""
