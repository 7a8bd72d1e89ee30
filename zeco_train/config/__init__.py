"""Configurations: schema, rules between fields, and command-line overrides."""
