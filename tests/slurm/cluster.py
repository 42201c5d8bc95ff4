"""A real Slurm on this machine: one controller, several daemons that are "nodes", GPUs of no use.

It needs root and Debian's slurm-wlm and munge, no systemd and no configuration of the machine. The
nodes share the machine's address and differ by port; their names resolve nowhere. Each has mounts
of its own, and GPUs that are character devices which nothing opens. Everything of it lies in one
folder and ends with it.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PROGRAMS = ("slurmctld", "slurmd", "munged", "munge", "sbatch")
NODES = ("train1", "train2", "roll1", "roll2")
GPUS = 8

# Jobs in ``high`` take the nodes of others, and ``low`` gets time to save. At preemption Slurm
# sends SIGCONT and SIGTERM to the tasks of the steps and nothing to the job's script, whatever
# --signal says; SlurmctldParameters=preempt_send_user_signal, in later releases
# PreemptParameters=send_user_signal, has --signal's sent in place of it. A script that ends in
# its grace time completes the job: it must requeue itself. One that does not is killed, and
# requeued by Slurm. A node that is set down is idle again at once (ReturnToService=2) while its
# daemon answers.
#
# cred_expire: a requeued job waits for it, 120 s by default. CR_Core_Memory, so that two jobs share
# a node only where they fit.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=5
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
JobCompType=jobcomp/none
NodeName=DEFAULT CPUs=128 RealMemory=2000000 Gres=gpu:h100:{gpus}
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP
PartitionName=main Default=YES
PartitionName=h100
PartitionName=low PriorityTier=1 GraceTime=60
PartitionName=high PriorityTier=10 PreemptMode=OFF
"""


class CannotStart(Exception):
    """One sentence: why there is no Slurm here."""


class Cluster:
    """A running Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def call(self, *command: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
        """A command as a user of the cluster calls it."""
        return subprocess.run(
            [*map(str, command)], env=self.env, cwd=cwd, capture_output=True, text=True
        )

    def on(self, node: str, *command: object) -> None:
        """A command that sees a node's mounts."""
        there = ["nsenter", "-t", str(self.daemons[node].pid), "--mount"]
        subprocess.run([*there, *map(str, command)], check=True)

    def update(self, *words: str) -> None:
        """``scontrol update ...``"""
        done = self.call("scontrol", "update", *words)
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def configured(self, line: str) -> Iterator[None]:
        """Inside, its controller has one more line in slurm.conf."""
        conf = self.folder / "slurm.conf"
        before = conf.read_text()
        try:
            conf.write_text(f"{before}{line}\n")
            self._reconfigure()
            yield
        finally:
            conf.write_text(before)
            self._reconfigure()

    def _reconfigure(self) -> None:
        done = self.call("scontrol", "reconfigure")
        assert done.returncode == 0, done.stderr

    def facts(self, job: int | str) -> dict[str, str]:
        """What the controller knows of a job; nothing once it has forgotten it."""
        said = self.call("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.partition("=")[::2] for word in said.split())

    def state(self, job: int | str) -> str:
        """Such as PENDING, RUNNING or COMPLETED."""
        return self.facts(job).get("JobState", "")

    def wait(self, condition: Callable[[], bool], seconds: float, what: str = "") -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what or condition} not within {seconds} s"
            time.sleep(0.2)

    def ended(self, job: int | str, seconds: float = 360.0) -> str:
        """Wait for a job's last state."""
        moving = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")
        self.wait(lambda: self.state(job) not in moving, seconds, f"the end of job {job}")
        return self.state(job)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start it, and end what was started.

    Raises:
        CannotStart: this machine has no Slurm, or lets nobody start it.
    """
    missing = [program for program in PROGRAMS if not shutil.which(program, path=SEARCHED)]
    if missing:
        raise CannotStart(f"{missing[0]} is not installed; `make test-slurm` installs it")
    if os.geteuid() != 0:
        raise CannotStart("not root, and only root starts daemons that run others' jobs")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        raise CannotStart("this machine gives no process mounts of its own, and each node has some")
    _munge()
    made = Cluster(folder)
    _configure(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_seen_by_nodes(folder.parent))
        stack.enter_context(_running([_found("slurmctld"), "-D"], made.env, folder))
        for node in NODES:
            own = ["unshare", "--mount", "--propagation=slave"]
            daemon = [*own, _found("slurmd"), "-D", "-N", node]
            made.daemons[node] = stack.enter_context(_running(daemon, made.env, folder))
        idle = partial(made.call, "sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        made.wait(lambda: set(idle().stdout.split()) == set(NODES), 60.0, "a cluster of idle nodes")
        try:
            yield made
        finally:
            made.call("scancel", "--user=root")
            made.wait(lambda: not made.call("squeue", "-h").stdout.strip(), 30.0, "the end")


@contextlib.contextmanager
def _seen_by_nodes(folder: Path) -> Iterator[None]:
    """Inside, what is mounted in the folder is mounted for the nodes as well."""
    for options in (["--bind", folder], ["--make-shared"]):
        subprocess.run(["mount", *map(str, options), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _configure(folder: Path) -> None:
    ports = _free_ports(len(NODES) + 1)
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    text = CONF.format(host=host, port=ports[0], folder=folder, gpus=GPUS, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    for name in NODES:
        (folder / f"spool-{name}").mkdir()
    for index in range(GPUS):
        try:
            os.mknod(folder / f"gpu{index}", 0o20666, os.makedev(1, 3))  # as /dev/null
        except PermissionError:
            raise CannotStart("this machine lets nobody make devices, which GPUs are") from None
    gres = f"Name=gpu Type=h100 File={folder}/gpu[0-{GPUS - 1}]\n"
    (folder / "gres.conf").write_text(gres)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _munge() -> None:
    """Have munge's daemon, which is the machine's: it stays."""
    if _munges():
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    as_munge = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", _found("munged")]
    done = subprocess.run(as_munge, capture_output=True, text=True)
    if done.returncode and not _munges():  # another process may have been faster
        raise CannotStart(f"munged: {done.stderr.strip()}")


def _munges() -> bool:
    return subprocess.run(["munge", "--no-input"], capture_output=True).returncode == 0


@contextlib.contextmanager
def _running(command: list[str], env: dict[str, str], folder: Path) -> Iterator[subprocess.Popen]:
    with (folder / "daemons.log").open("ab") as log:
        daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        yield daemon
    finally:
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _found(program: str) -> str:
    return shutil.which(program, path=SEARCHED)
