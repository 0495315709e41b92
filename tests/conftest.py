"""Stands here so that tests of all folders can import the helpers beside it."""
