"""`python -m lab.paper out=FOLDER`: the papers' tables and figures with a model's values and our own.

No GPU is needed: the papers' figures are in `../reference`, ours in `../results`, and the rest is computed.
"""
