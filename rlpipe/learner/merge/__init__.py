"""Merging a LoRA adapter into its base model: in files (``rlpipe merge``), and in memory during training."""
