"""The ledger of a run, in SQLite: every prompt, group, step and event, and the invariants among them."""
