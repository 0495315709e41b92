"""Policy weights between learner and engines: buckets, digests, broadcast."""
