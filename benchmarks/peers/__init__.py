"""How others do what we do, for `qurl bench` to measure beside it."""
