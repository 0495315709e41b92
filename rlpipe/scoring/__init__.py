"""Rewards: loading them, calling them on finished groups, and writing their values into the rollouts."""
