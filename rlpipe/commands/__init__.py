"""One file for each command, or for those that look at the same thing; what they import when they run is heavy."""
