"""The local page of `rlpipe view`: reads runs, also while they go on, and changes nothing in their folders."""
