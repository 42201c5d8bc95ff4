"""The checks run where ``make test-emulated`` has set the emulated device up, and nowhere else."""

import os

collect_ignore_glob = [] if os.environ.get("EMULATED_CUDA_DEVICES") else ["test_*.py"]
