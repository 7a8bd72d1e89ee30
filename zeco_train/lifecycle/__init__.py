"""The process of a rank from start to end: errors, exit codes, lost peers, log files."""
