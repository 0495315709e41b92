"""Groups on their way from admission to a trained step, and the ledger that keeps account of them."""
