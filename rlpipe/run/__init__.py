"""A run from end to end: its cluster, its workers, and the loops that control them."""
