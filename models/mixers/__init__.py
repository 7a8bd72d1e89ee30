"""Token mixers, a file each; `models.registry` lists them."""
