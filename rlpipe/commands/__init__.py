"""The commands, one file per subject; heavy imports are deferred until a command runs."""
