"""Checks of a whole config for options that contradict each other, and for files that do not exist."""
