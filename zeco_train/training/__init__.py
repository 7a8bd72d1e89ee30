"""Training: what is built for a run, the step, and the loop around it."""
