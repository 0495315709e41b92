"""Advantages and losses: pure functions from rewards and log-probs to the loss that the learner minimises."""
