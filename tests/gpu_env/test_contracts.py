"""Every name and argument relied on is in the packages that are installed here."""

import zipfile
from importlib import metadata

import pytest

from tests.contracts.relied_on import ROWS, missing
from tests.contracts.source import Sources

PACKAGES = ("megatron-core", "transformer-engine", "sglang")


@pytest.mark.parametrize("name", [n for n in PACKAGES if [*metadata.distributions(name=n)]])
def test_the_installed_package_has_what_is_relied_on(name, tmp_path):
    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        for file in metadata.files(name):
            if file.suffix == ".py":
                wheel.write(file.locate(), str(file))
    sources = Sources(tmp_path / "wheel")
    assert [gone for row in ROWS if row.package == name and (gone := missing(row, sources))] == []
