"""Loss masks: the tokens of a conversation that count in the loss."""
