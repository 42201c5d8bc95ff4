"""The protocol of trainers and engines: messages, leases, transports."""

SLOTS = 2
"""Buckets of a training rank in memory: one is filled while the other is sent."""
