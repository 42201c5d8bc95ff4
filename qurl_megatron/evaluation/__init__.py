"""Accuracy on benchmark files, by any engine: Avg@1, Avg@k, pass@k and how far to trust them."""
