"""Rollouts: engines and their client, published versions, and the collection of samples."""
