"""How long tests wait; apart from `tests.support.commands`, which imports the trainer."""

# Seconds that nothing here takes, not even with four busy processes on two cores: it bounds waits for events, and is
# reached only when a test fails.
ENOUGH = 240.0
