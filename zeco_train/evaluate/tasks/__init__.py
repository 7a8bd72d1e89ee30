"""Recall evaluations, by depth and sequence length."""
