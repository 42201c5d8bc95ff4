"""A part imports only parts that the README lists above it; read off the imports."""

import ast
import importlib
import sys
from itertools import takewhile
from pathlib import Path

import pytest

import qurl_megatron
from qurl_megatron.schemes import SCHEMES

ROOT = Path(qurl_megatron.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
README = ROOT.parent / "README.md"
KERNELS = {"qurl_megatron.algo.fused_vocabulary", "qurl_megatron.quant.fused_channels"}
BELOW_ALL = "engines.kinds"  # a table, which keys of the configuration read


def listed() -> list[str]:
    """The parts of the package, in the order in which the README has them."""
    lines = README.read_text(encoding="utf-8").split("\nqurl_megatron/\n")[1].splitlines()
    rows = takewhile(lambda line: line.startswith("  "), lines)
    heads = [row.split() for row in rows if not row.startswith("   ")]
    parts = [word for words in heads for word in words[:2] if word.endswith(("/", ".py"))]
    return [word.removesuffix("/").removesuffix(".py") for word in parts]


ORDER = {part: place for place, part in enumerate(listed())}


def imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.append(node.module)
    return found


def part(module: str) -> str:
    """The part of the package a dotted name belongs to."""
    return (module.split(".") + [""])[1]


def place(module: str) -> int:
    return -1 if module == f"qurl_megatron.{BELOW_ALL}" else ORDER[part(module)]


def test_the_readme_lists_every_part_once():
    parts = {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in FILES} - {"__init__"}
    assert sorted(listed()) == sorted(parts)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_downwards(file):
    own = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    if own == "__init__":
        return
    for module in imports(file):
        if module.startswith("qurl_megatron."):
            assert place(module) <= place(f"qurl_megatron.{own}"), f"{own} must not import {module}"


def test_algorithms_and_quantizers_are_pure():
    allowed = {"algo", "quant", "kit", "schemes", "types"}
    for file in [*ROOT.glob("algo/*.py"), *ROOT.glob("quant/*.py")]:
        for module in imports(file):
            top = module.split(".")[0]
            assert top not in ("megatron", "sglang", "transformers"), f"{file}: {module}"
            assert top != "qurl_megatron" or part(module) in allowed, f"{file}: {module}"


def test_rollout_knows_no_megatron_and_the_model_no_engine():
    for room in ("wire", "engines", "fleet"):
        for file in ROOT.glob(f"{room}/**/*.py"):
            assert not any(m.startswith("megatron") for m in imports(file)), file
    for file in ROOT.glob("actor/*.py"):
        assert not any(m.startswith(("sglang", "qurl_megatron.engines")) for m in imports(file))


def test_what_travels_into_an_engine_imports_next_to_nothing():
    """SGLang's environment has no Megatron, and none of what only a trainer needs."""
    packages = {"torch", "numpy", "msgspec", "orjson", "safetensors", "xxhash"}
    ours = {"tensors", "wire"}
    names = ("children", "disk", "errors", "filesystem", "network", "record", "undertaker")
    helpers = {f"kit.{name}" for name in names}
    for file in ROOT.glob("wire/*.py"):
        for module in imports(file):
            name = module.removeprefix("qurl_megatron").removeprefix(".")
            if module.startswith("qurl_megatron"):
                known = not name or part(module) in ours or name in helpers | {"kit", "schemes"}
            else:
                known = module.split(".")[0] in packages | sys.stdlib_module_names
            assert known, f"{file}: {module}"
    for name in helpers:
        for module in imports(ROOT / f"{name.replace('.', '/')}.py"):
            known = module.split(".")[0] in sys.stdlib_module_names | {"msgspec"}
            assert known or module == "qurl_megatron.kit.errors", f"{name}: {module}"


def test_only_commands_and_the_training_see_a_whole_recipe():
    for file in FILES:
        may = ("cli.py", "cluster", "config", "evaluation", "plan", "run.py", "training")
        if file.relative_to(ROOT).parts[0] in may:
            continue
        assert "RunConfig" not in file.read_text(encoding="utf-8"), file


def test_nothing_is_measured_with_a_clock_that_can_be_set():
    for file in set(FILES) - {ROOT / "kit/clock.py"}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            set_by_hand = isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time"
            assert not set_by_hand, f"{file}: take time.monotonic, or kit.clock.now"


def test_triton_is_imported_by_its_kernels_alone_and_they_only_inside_functions():
    kernels = {
        f"qurl_megatron.{file.parent.name}.{file.stem}"
        for file in FILES
        if any(module.startswith("triton") for module in imports(file))
    }
    assert kernels == KERNELS
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        at_once = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom):
                    names = [node.module] + [f"{node.module}.{name}" for name in names]
                assert not (kernels & set(names) and id(node) in at_once), file


def test_schemes_are_listed_in_their_table_alone():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                names = {one.value for one in node.elts if isinstance(one, ast.Constant)}
                assert len(names & {*SCHEMES}) < 3, f"{file}:{node.lineno}: read schemes.py"


def test_names_that_other_code_relies_on():
    public = {
        "algo": ("objective", "token_log_probs"),
        "quant": ("quantize", "dequantize"),
        "weights": ("fold_uaq", "unfold_uaq"),
    }
    for room, names in public.items():
        module = importlib.import_module(f"qurl_megatron.{room}")
        for name in names:
            assert callable(getattr(module, name))
            assert getattr(qurl_megatron, name) is getattr(module, name)
