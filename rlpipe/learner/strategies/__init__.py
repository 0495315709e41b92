"""The ways to hold a policy and to update it: on one rank, by FSDP2 or ZeRO-3, or in chunks."""
