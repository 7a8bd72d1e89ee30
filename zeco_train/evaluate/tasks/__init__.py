"""Evaluations of what a model recalls, from anywhere in a sequence of any length."""
