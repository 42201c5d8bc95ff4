"""A run's measurements: metrics that know their reduction, where they go, and how they look.

The modules are imported by name: ``report`` draws with matplotlib, and ``metrics`` is light.
"""
