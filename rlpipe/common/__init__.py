"""Helpers for files, imports, the hub and formatted numbers, used by all packages; without torch or Ray."""
