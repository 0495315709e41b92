"""Views of a run's rows for people: in the terminal, as an HTML page, and as statistics."""
