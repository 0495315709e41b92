"""Starts Ray's worker processes as forks of processes that have their imports done."""
