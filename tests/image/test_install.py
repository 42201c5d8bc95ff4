"""launch/images/install.sh on a bare Debian root, without a GPU: ``make test-image``, as root.

Takes about 25 GB and an hour. ``IMAGE_ROOT`` names the root, which is kept: tests of one that is
installed take minutes. ``IMAGE_BIND`` names what pip needs of this machine, as outside[:inside].
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
IMAGE_ROOT = os.environ.get("IMAGE_ROOT", "")
ENTER = """
root=$1; shift
mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"
for pair in $IMAGE_BIND; do
  inside=$root${pair#*:}
  [ -d "${pair%%:*}" ] && mkdir -p "$inside" || { mkdir -p "${inside%/*}"; touch "$inside"; }
  mount --bind -o ro "${pair%%:*}" "$inside"
done
exec chroot "$root" "$@"
"""
pytestmark = [
    pytest.mark.skipif(not IMAGE_ROOT, reason="`make test-image` runs them"),
    pytest.mark.timeout(6 * 3600),
]


def inside(root: Path, *command: str) -> str:
    """Run a command in the root, of this machine's environment with pip's variables alone."""
    env = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "IMAGE_"))}
    env |= {"PATH": "/opt/qurl/trainer/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    enter = ["unshare", "--mount", "bash", "-ec", ENTER, "bash", str(root), *command]
    done = subprocess.run(enter, env=env, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def root() -> Path:
    root = Path(IMAGE_ROOT).absolute()
    if not (root / "installed").exists():
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True)
        (root / "src").mkdir()
        tar = subprocess.run(["git", "archive", "HEAD"], cwd=CHECKOUT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "x", "-C", root / "src"], input=tar.stdout, check=True)
        print(inside(root, "bash", "/src/launch/images/install.sh", "/src"))
        (root / "installed").touch()
    return root


@pytest.mark.parametrize(
    ("environment", "modules"),
    [
        ("trainer", "torch, triton, pynvml, megatron.core, transformer_engine.pytorch"),
        ("sglang", "torch, sglang, flashinfer, transformers"),
    ],
)
def test_an_environment_agrees_with_itself_and_imports(root, environment, modules):
    python = f"/opt/qurl/{environment}/bin/python"
    faults = inside(root, "bash", "-c", f"{python} -m pip check || true").splitlines()
    # Engines need little of what this package asks for, and are installed without it.
    own = "qurl-megatron " if environment == "sglang" else "No broken requirements"
    assert [line for line in faults if not line.startswith(own)] == []
    inside(root, python, "-P", "-c", f"import qurl_megatron, {modules}")


def test_no_start_compiles_what_the_image_has(root):
    """Neither Python's modules nor FlashInfer's sampling."""
    packages = root / "opt/qurl/sglang/lib/python3.11/site-packages"
    sources = [*packages.glob("sglang/srt/**/*.py"), *packages.glob("qurl_megatron/**/*.py")]
    cached = {path.name for path in packages.rglob("__pycache__/*.pyc")}
    assert len(sources) > 500
    assert {f"{source.stem}.cpython-311.pyc" for source in sources} <= cached
    look = "from flashinfer.jit.sampling import gen_sampling_module as make; print(make().is_aot)"
    python = ["env", "FLASHINFER_CUDA_ARCH_LIST=9.0a", "/opt/qurl/sglang/bin/python", "-P"]
    assert inside(root, *python, "-c", look) == "True\n"


def test_the_image_trains_on_a_machine_without_a_gpu(root):
    shutil.rmtree(root / "run", ignore_errors=True)
    recipe = ["quickstart", "train.run_dir=/run", "model.path=/run/model", "train.steps=1"]
    small = ["warmstart.steps=1", "train.eval_prompts=0", "data.prompts_per_step=4"]
    inside(root, "qurl", "train", *recipe, *small)
    assert (root / "run/report.html").exists()
