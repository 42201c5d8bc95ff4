"""What a trainer and an engine must agree on: messages, manifests, leases, ways for the bytes."""

SLOTS = 2
"""Buckets that a training rank has under way: one is filled while the other is sent."""
