from pathlib import Path

import pytest

from qurl_megatron.cluster.cluster import JobConfig, load_cluster
from qurl_megatron.config import to_toml
from qurl_megatron.kit.errors import ConfigError
from tests.support.slurm_scripts import FOLDER


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("file", sorted((FOLDER / "clusters").glob("*.toml")), ids=lambda f: f.stem)
def test_every_cluster_file_that_ships_is_read_and_written_back_the_same(file, tmp_path):
    cluster = load_cluster(file)
    assert load_cluster(written(tmp_path / "again.toml", to_toml(cluster))) == cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[job]\npartitoin = 'a'", "unknown key job.partitoin; did you mean job.partition?"),
        ("[nodes]\ngpus = 8", "unknown section nodes; did you mean node?"),
        ("[node]\ngpus = 'eight'", "node.gpus must be of type int, got 'eight'"),
        ("[node]\ngpus = 8\ncpus = 4", "node.cpus=4 gives some of node.gpus=8 no CPU; raise it"),
        ("[job]\nlayout = 'split'", "unknown key job.layout"),
        ("[job]\ntime_limit = '24h'", "job.time_limit must be like 24:00:00 or 2-00:00:00"),
        ("[job]\nsignal_s = 30", "job.signal_s must be 60 or more"),
        ("[job]\ntime_limit = '00:10:00'", "job.signal_s=900 leaves nothing of job.time_limit"),
        ("[container]\nkind = 'pyxis'", "container.kind=pyxis and container.image='' contradict"),
        (
            "[container]\nkind = 'pyxis'\nimage = 'q.sqsh'",
            "container.image=q.sqsh: pyxis takes a file only by a path that begins with / or ./; "
            "write ./q.sqsh",
        ),
        ("[job]\nretries = 3", "job.retries no longer exists: a run is tried again as long as"),
        ("[node]\ninterfaces = ['ib0']", "node.interfaces no longer exists: set NCCL_SOCKET_IFNAM"),
        ("[container]\nimage = 'a.sif'", "container.kind=none and container.image='a.sif' contr"),
        ("[site]\nshared = ['runs']", "site.shared must be absolute folders, got 'runs'"),
        ("[site.environment]\nA = 1", "site.environment must be strings by variable, got A = 1"),
        ("[site.environment]\nWANDB_API_KEY = 'x'", "leave secrets to files that only you can"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_one_sentence_with_file_and_key(text, said, tmp_path):
    file = written(tmp_path / "mine.toml", text)
    with pytest.raises(ConfigError) as error:
        load_cluster(file)
    assert said in str(error.value)
    assert str(error.value).startswith(f"cluster file {file}: ")


def test_a_cluster_file_that_is_not_there_leads_to_those_that_ship(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; these ship: .*h100"):
        load_cluster(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("limit", "seconds"), [("00:30:00", 1800), ("24:00:00", 86400), ("2-01:00:05", 176405)]
)
def test_a_time_limit_in_seconds(limit, seconds):
    assert JobConfig(time_limit=limit).time_limit_s == seconds
