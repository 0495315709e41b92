"""Checks before a run, and the diagnosis of one that has ended: what `rlpipe doctor` prints.

``observations`` are its lines. ``machine_checks`` look at this machine, ``run_checks`` at a config, and ``trial_step``
trains one step of it in a temporary folder. ``diagnosis`` reads the folder of a run.
"""
