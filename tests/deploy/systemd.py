"""A real systemd as the first process of a PID namespace, on a temporary root."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.deploy.image import ROOT
from tests.waiting import poll_until

SYSTEMD = Path("/lib/systemd/systemd")
UNITS = ROOT / "deploy" / "systemd"
NOTHING: Mapping[str, Path] = MappingProxyType({})

# Everything is written to memory above this machine's root, which is only read. The unit's
# program is the one of an environment.
BOOT = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$WORK"
cd "$WORK"
mkdir upper work root
mount -t overlay overlay -o "lowerdir=/,upperdir=$WORK/upper,workdir=$WORK/work" root
cd root
mkdir -p opt/vllm-gateway/.venv opt/venv etc/vllm-gateway old
mount -t proc proc proc
mount --rbind /dev dev
mount -t sysfs sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
# Version 1 of control groups, or version 2, as this machine has them.
mkdir sys/fs/cgroup/systemd sys/fs/cgroup/unified
if mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd 2>/dev/null
then mount -t cgroup2 cgroup2 sys/fs/cgroup/unified
else umount sys/fs/cgroup; mount -t cgroup2 cgroup2 sys/fs/cgroup
fi
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount --bind "$PYTHON" usr/local
mount --bind "$VENV" opt/venv
mount --bind "$VENV" opt/vllm-gateway/.venv
printf '%s' "$MOUNTS" | while read -r source target
do mkdir -p "$target"; mount --bind "$source" "$target"
done
mkdir -p run/systemd/system
cp "$UNITS/vllm-gateway.service" "$UNITS/vllm-gateway.socket" run/systemd/system/
printf '[Unit]\\nDescription=nothing else\\n' > run/systemd/system/bare.target
cp "$CONFIG" etc/vllm-gateway/gateway.yaml
cp "$SECRETS" etc/vllm-gateway/env
mkdir -p run/sysusers.d
cp "$UNITS/vllm-gateway.sysusers.conf" run/sysusers.d/vllm-gateway.conf
chroot . systemd-sysusers
pivot_root . old
umount -l /old
exec env -i container=test PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    /lib/systemd/systemd --system --unit=bare.target --log-target=null --show-status=no
"""


@dataclass
class System:
    """A running systemd; `pid` of its first process, seen from outside."""

    pid: int

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        inside = ["nsenter", f"--target={self.pid}", "-m", "-p", "-u", "-i", "-C"]
        return subprocess.run(
            [*inside, *words], capture_output=True, text=True, timeout=120, check=False
        )

    def systemctl(self, verb: str, unit: str = "vllm-gateway.service") -> int:
        """Run systemctl on a unit; return its exit code."""
        return self.run("systemctl", verb, unit).returncode

    def drop_in(self, unit: str, text: str) -> None:
        """Add lines to a unit."""
        directory = f"/run/systemd/system/{unit}.d"
        write = f"mkdir -p {directory} && printf '%s' {shlex.quote(text)} > {directory}/test.conf"
        assert self.run("/bin/sh", "-c", write).returncode == 0
        assert self.run("systemctl", "daemon-reload").returncode == 0

    def shows(self) -> dict[str, str]:
        """The unit's properties."""
        lines = self.run("systemctl", "show", "vllm-gateway").stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def journal(self) -> str:
        """The output of the unit."""
        return self.run("journalctl", "--no-pager", "--unit=vllm-gateway", "-o", "cat").stdout


@contextmanager
def booted(
    venv: Path, directory: Path, config: Path, secrets: Path, mounts: Mapping[str, Path] = NOTHING
) -> Iterator[System]:
    """Run a systemd that knows the unit; `mounts` are directories of ours that it sees, and where.

    The unit's Python environment, `venv`, has the paths of one in /opt/venv. No name may have
    blanks.
    """
    work = directory / "system"
    work.mkdir()
    variables = {
        "WORK": work,
        "PYTHON": sys.base_prefix,
        "VENV": venv,
        "UNITS": UNITS,
        "CONFIG": config,
        "SECRETS": secrets,
        "MOUNTS": "".join(f"{ours} {theirs[1:]}\n" for theirs, ours in mounts.items()),
    }
    namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--cgroup", "--uts", "--ipc"]
    process = subprocess.Popen(
        ["unshare", *namespaces, "/bin/bash", "-c", BOOT],
        env={"PATH": os.environ["PATH"], **{name: str(value) for name, value in variables.items()}},
        stdout=subprocess.DEVNULL,
    )
    try:
        poll_until(lambda: bool(psutil.Process(process.pid).children()), 10)
        system = System(psutil.Process(process.pid).children()[0].pid)

        def up() -> bool:
            assert process.poll() is None, "systemd did not start"
            return system.run("systemctl", "is-active", "bare.target").returncode == 0

        poll_until(up, 60, every_s=0.1)
        yield system
    finally:
        process.send_signal(signal.SIGKILL)  # and with it all of the namespace
        process.wait()
        shutil.rmtree(work)
