"""Fast start of Ray's worker processes, as forks of processes that have already imported the libraries."""
