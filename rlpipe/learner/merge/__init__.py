"""Merges a LoRA adapter into its base model's files: ``rlpipe merge``."""
