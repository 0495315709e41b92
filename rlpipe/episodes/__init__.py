"""Episodes: the policy writes, something answers, and the policy writes again."""
