"""Process mesh, devices, sharding of the model, and the check that all ranks have the same setup."""
