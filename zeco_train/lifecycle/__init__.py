"""Process lifecycle of a rank: errors, exit codes, lost peers, log files."""
