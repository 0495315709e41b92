"""Checks of a whole config: options that contradict each other, and files that do not exist."""
