"""The planner: what a run will take of memory, wire and time, before anything runs.

`calibration.py` holds every measured or assumed constant; the other files hold formulas only.
"""
