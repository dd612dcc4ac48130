"""A Slurm of two nodes on this machine, of which the second has mounts and a /tmp of its own.

Needs root and the packages slurmctld, slurmd, slurm-client and munge. There is no accounting. By hand:
``python -m tests.cluster.slurm FOLDER`` starts one and stops it at the end of its input.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")
CONF = """
ClusterName=posbench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldPidFile={place}/slurmctld.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=3
MinJobAge=5
SchedulerParameters=sched_interval=2,batch_sched_delay=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port=17001 CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=17002 CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """What of this is not here."""
    return [name for name in NEEDED if not shutil.which(name)] + ["root"] * (
        os.geteuid() != 0
    )


class Slurm:
    """The daemons; ``place`` must not lie under /tmp, which the second node has for itself."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.daemons = dict[str, subprocess.Popen[bytes]]()
        place.mkdir(parents=True, exist_ok=True)
        (place / "state").mkdir(exist_ok=True)
        self.conf = place / "slurm.conf"
        self.conf.write_text(CONF.format(place=place, host=socket.gethostname()))
        os.environ["SLURM_CONF"] = str(self.conf)

    def start(self) -> None:
        """Start all, and wait until both nodes are idle."""
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        self._run(
            "munged",
            [
                "setpriv",
                "--reuid=munge",
                "--regid=munge",
                "--clear-groups",
                "munged",
                "-F",
                "--force",
            ],
        )
        self._run("slurmctld", ["slurmctld", "-D", "-i"])
        for node in ("n1", "n2"):
            self.start_node(node)
        self.wait_idle()

    def start_node(self, node: str) -> None:
        """Start a node's daemon; that of n2 in a mount namespace of its own, with an empty /tmp."""
        alone = "mount --make-rprivate / && mount -t tmpfs none /tmp && exec slurmd -D -N n2"
        self._run(
            node,
            ["unshare", "-m", "sh", "-c", alone]
            if node == "n2"
            else ["slurmd", "-D", "-N", node],
        )

    def wait_idle(self) -> None:
        """Wait until both nodes can take jobs."""
        for _ in range(120):
            told = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%N %t"], capture_output=True, text=True
            )
            if sorted(told.stdout.split()) == ["idle", "idle", "n1", "n2"]:
                return
            time.sleep(0.5)
        raise RuntimeError(
            f"no idle nodes: {told.stdout}{told.stderr}; see {self.place}"
        )

    def stop(self) -> None:
        """Stop all, and whatever jobs are left."""
        subprocess.run(
            ["scancel", "--full", "--user=root"], check=False, capture_output=True
        )
        time.sleep(1)
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        os.environ.pop("SLURM_CONF", None)

    def _run(self, name: str, command: list[str]) -> None:
        with open(self.place / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log)


if __name__ == "__main__":
    slurm = Slurm(Path(sys.argv[1]))
    slurm.start()
    print(f"export SLURM_CONF={slurm.conf}", flush=True)
    sys.stdin.read()
    slurm.stop()
