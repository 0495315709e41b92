"""Training of models larger than a device's memory, whose weights move in chunks according to a plan."""
