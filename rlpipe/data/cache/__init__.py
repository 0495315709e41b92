"""A cache of rendered rows, for all runs that would render them in the same way."""
