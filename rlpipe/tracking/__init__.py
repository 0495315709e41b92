"""Reporting of a run: metrics to every tracker, progress to the terminal, and a summary at the end."""
