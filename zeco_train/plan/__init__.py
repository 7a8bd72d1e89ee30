"""The planner: predicted memory, communication and time of a run, before anything runs.

`calibration.py` holds every measured or assumed constant, and `activations.py` measures one block of the model, without
the planned device. The other files hold formulas only.
"""
