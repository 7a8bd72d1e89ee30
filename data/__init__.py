"""Token stores, and loaders that read one rank's slice of a sequence."""
