"""Benchmarks, and pages of docs made from their records; for a checkout, no part of the wheel."""
