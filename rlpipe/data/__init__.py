"""Prompt and SFT sources, chat rendering, loss masks and packing."""
