"""Says before a run what it will take: memory, time, and what would have to change for it to fit."""
