"""Each file is for the environment that has its package; ``make test-gpu-env`` installs both."""

from importlib import metadata

PACKAGES = {"test_trainer.py": "transformer-engine-torch", "test_engines.py": "sglang-kernel"}
collect_ignore = [f for f, name in PACKAGES.items() if not [*metadata.distributions(name=name)]]
