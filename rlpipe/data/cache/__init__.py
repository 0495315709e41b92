"""Rows that are rendered once, and found again by the runs that would render them alike."""
