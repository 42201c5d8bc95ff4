"""Every name and argument relied on is in the packages that are installed here."""

import zipfile
from importlib import metadata

import pytest

from tests.contracts.relied_on import ROWS, missing
from tests.contracts.source import Sources

PACKAGES = ("megatron-core", "transformer-engine", "sglang")
INSTALLED = [p for p in PACKAGES if next(iter(metadata.distributions(name=p)), None)]


@pytest.mark.parametrize("package", INSTALLED)
def test_the_installed_package_has_what_is_relied_on(package, tmp_path):
    wheel = tmp_path / "installed.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in metadata.files(package):
            if file.suffix == ".py":
                archive.write(file.locate(), str(file))
    found = Sources(wheel)
    gone = [what for row in ROWS if row.package == package and (what := missing(row, found))]
    assert not gone, "; ".join(gone)
