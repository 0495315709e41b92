"""What a training step needs and takes, and the fastest way to carry it out that fits."""
