"""Timeout of tests; separate from `tests.support.commands`, which imports the trainer."""

# Seconds, far more than anything here takes even with four busy processes on two cores: bounds waits for events, and is
# reached only by failing tests.
ENOUGH = 240.0
