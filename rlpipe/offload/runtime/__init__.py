"""Chunks of a model on the host and on the device while it trains: copies, gradients, optimizer."""
