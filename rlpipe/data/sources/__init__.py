"""Rows of files, data sets and reasoning-gym tasks, in an order that can be resumed."""
