"""Sandboxed processes, with limits and without network, for code that models wrote."""
