"""Strategies to hold and update a policy: on one rank, sharded by FSDP2 or ZeRO-3, or in offloaded chunks."""
