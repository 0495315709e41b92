"""Estimates of a run's memory and time before it starts, and the config changes with which it would fit."""
