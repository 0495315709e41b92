"""Training models larger than a device's memory, chunk by chunk, as a planner decides."""
