"""One rank of the learner: the policy, its training steps, checkpoints and weight publishing; independent of Ray."""
