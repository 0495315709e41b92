"""Advantages and losses: pure functions from rewards and log-probs to what the learner minimises."""
