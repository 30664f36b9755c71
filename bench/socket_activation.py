"""Runs a command with listening sockets, as systemd runs a service with a .socket unit.

    python socket_activation.py FD[,FD]... COMMAND [ARGUMENT]...

A script that the parent of the sockets starts: it moves the descriptors to 3 and up, sets the
variables of sd_listen_fds(3) and becomes the command.
"""

import fcntl
import os
import sys

FIRST_FD = 3


def main(fds: list[int], command: list[str]) -> None:
    """Become the command."""
    # Out of the way first: one may have the number that another is to get.
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FD + len(fds)) for fd in fds]
    for number, fd in enumerate(above, FIRST_FD):
        os.dup2(fd, number)
    os.closerange(FIRST_FD + len(fds), max(above) + 1)
    names = ":".join(["vllm-gateway.socket"] * len(fds))
    passed = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": names}
    os.execvpe(command[0], command, os.environ | passed)


if __name__ == "__main__":
    main([int(fd) for fd in sys.argv[1].split(",")], sys.argv[2:])
