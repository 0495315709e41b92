"""The rows of a run as people look at them."""
