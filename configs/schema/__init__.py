"""Every option of a run, as dataclasses with ranges and one line of documentation each."""
