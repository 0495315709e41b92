"""Checkpoints of a run, the learner's state in them, and the trained policy as files."""
