"""Operating-system helpers: files and paths, untrusted small files, signals, threads, terminals."""
