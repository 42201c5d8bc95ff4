#!/usr/bin/env python3
"""Train on machines without a batch system, under torchrun; the same command on every node:

    python launch/torchrun.py --nnodes 2 --nproc-per-node 8 --rdzv-endpoint head:29500 RECIPE

A run that fails is started again from its newest checkpoint; docs/reliability.md says what follows
on what. SIGTERM, Ctrl-C or a closed session, on any node, saves and ends it on all.
"""

import sys

from qurl_megatron.torchrun.command import main

sys.exit(main())
