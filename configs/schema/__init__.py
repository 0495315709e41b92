"""Every option of a run, in dataclasses, each with its range and one line of documentation."""
