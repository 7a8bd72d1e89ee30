"""What a process has of its machine: users' files and paths, small files of strangers, signals, threads, terminals."""
