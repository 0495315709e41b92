"""Which tokens of a conversation count in the loss."""
