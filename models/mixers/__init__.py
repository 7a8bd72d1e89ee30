"""Token mixers, one file each; `models.registry` lists them."""
