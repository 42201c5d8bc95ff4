"""Two operators that torchvision expects when it is imported, and a torch for CPUs lacks.

SGLang imports torchvision for images, of which there are none here, and its tools do so as well
(``python -m sglang.bench_serving``). ``make sglang`` has each Python of its environment call
``before_import``, which costs nothing until torchvision is wanted.
"""

import importlib.abc
import sys

_libraries: list = []  # an operator lives as long as its library


def define_operators() -> None:
    """Define the operators that PyPI's wheel looks up, once, unless torch has CUDA."""
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def before_import() -> None:
    """Define the operators when torchvision is imported, and not before."""
    sys.meta_path.insert(0, _Before())


class _Before(importlib.abc.MetaPathFinder):
    """Finds nothing, but sees each import."""

    def find_spec(self, fullname, path=None, target=None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            define_operators()
