import pytest

from qurl_megatron.kit.disk import lock, write_whole


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


def test_a_lock_is_held_until_its_file_is_closed(tmp_path):
    path = tmp_path / ".lock"
    with path.open("w") as first, path.open("w") as second:
        assert lock(first) and not lock(second)
        first.close()
        assert lock(second)
