"""The engine that samples with transformers' generate."""
