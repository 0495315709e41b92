"""Engines that sample groups, the choice among them, and which of them may be given work."""
