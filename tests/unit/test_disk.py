import pytest

from qurl_megatron.kit.disk import new_folder, write_whole
from qurl_megatron.kit.errors import ConfigError


def test_a_file_that_cannot_be_written_whole_is_left_as_it_was_with_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "folder", b"new", sync=True)
    assert path.read_text() == "old"
    assert {each.name for each in tmp_path.iterdir()} == {"a.json", "folder"}


def test_a_new_folder_appears_whole(tmp_path):
    path = tmp_path / "deep" / "model"
    with new_folder(path) as aside:
        (aside / "file").write_text("x")
        assert not path.exists()
    assert (path / "file").read_text() == "x"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_failed_never_appears(tmp_path):
    with pytest.raises(RuntimeError), new_folder(tmp_path / "model") as aside:
        (aside / "file").write_text("x")
        raise RuntimeError
    assert not any(tmp_path.iterdir())


def test_what_is_there_already_is_not_touched(tmp_path):
    (tmp_path / "model").mkdir()
    with new_folder(tmp_path / "model") as aside:  # empty: nothing to lose
        (aside / "file").write_text("x")
    with pytest.raises(ConfigError, match="exists already"), new_folder(tmp_path / "model"):
        raise AssertionError("not reached")
    assert (tmp_path / "model" / "file").read_text() == "x"
