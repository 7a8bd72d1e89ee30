"""Evaluation of a trained model: `[torchrun …] python -m zeco_train.evaluate RUN [--tasks …] [KEY=VALUE …]`."""
