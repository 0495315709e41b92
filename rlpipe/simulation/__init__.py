"""Runs admission, routing and replay in virtual time, against given times of generation, scoring and training."""
