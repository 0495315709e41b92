"""Simulation of admission, routing and replay in virtual time, with given times of generation, scoring and training."""
