"""Stands for a package that uses the GPU as soon as it is imported."""

import torch

torch.cuda.init()
