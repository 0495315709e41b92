"""Groups on their way from admission to a trained step, and the ledger that records them."""
