"""Profile and cost model of a training step with offload, and the search for the fastest plan that fits."""
