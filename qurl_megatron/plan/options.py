"""The options of ``qurl plan``; argparse alone, since every command's help reads them."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """To a parser that has the recipe and its overrides."""
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs in all")
    parser.add_argument("--gpu", default="h100", help="kind: a100-80, h100, h200 or b200")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    parser.add_argument(
        "--network-gbps", type=float, metavar="GB", help="GB/s of the network per GPU, one way"
    )
    parser.add_argument(
        "--mean-tokens", type=float, metavar="N", help="mean length of a response, in tokens"
    )
    parser.add_argument("--mean-prompt-tokens", type=float, metavar="N", help="and of a prompt")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="the model's config.json, or its folder; default: where model.path is",
    )
    parser.add_argument("--top", type=int, default=12, metavar="N", help="rows of the table")
    parser.add_argument(
        "--up-to", type=int, default=1024, metavar="N", help="GPUs to simulate; 0: only --gpus"
    )
    parser.add_argument("--json", action="store_true", help="every layout, and all numbers")
