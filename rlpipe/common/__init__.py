"""Files, imports, the hub and formatted numbers, for every other package; needs neither torch nor Ray."""
