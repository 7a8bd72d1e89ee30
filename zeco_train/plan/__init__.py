"""The planner: predicted memory, communication and time of a run, before anything runs.

`calibration.py` holds every measured or assumed constant; the other files hold formulas only.
"""
