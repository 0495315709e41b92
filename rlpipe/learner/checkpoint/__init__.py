"""A run's checkpoints, the learner state that they hold, and the export of the trained policy."""
