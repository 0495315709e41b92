"""Transfer of policy weights from the learner to the engines: buckets, digests, broadcast."""
