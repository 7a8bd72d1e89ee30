"""Models. They take a `SequenceShard`; communication between ranks is hidden behind it."""
