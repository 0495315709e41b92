"""Rewards: loading them, calling them on finished groups, and writing what they answer into the rollouts."""
