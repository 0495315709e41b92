"""Rollout engines that sample groups, the routing of groups to engines, and the engines' health."""
