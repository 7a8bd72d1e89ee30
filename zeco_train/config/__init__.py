"""Configurations: their schema, the rules between their fields, and what users set on the command line."""
