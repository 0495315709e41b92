"""One learner rank: its policy, its steps, its checkpoints, and what it publishes; knows no Ray."""
