"""Models. They take a `SequencePosition`; communication between ranks is hidden behind it."""
