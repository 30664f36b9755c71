"""Describes the interpreter that runs it, for deploy/interpreters.sh.

Prints rank, executable, version and traits, separated by tabs; the lowest rank is the best one.
Exits with status 1 in a version of Python that the gateway does not support.
"""

import os
import subprocess
import sys
import sysconfig

OLDEST, NEWEST = (3, 11), (3, 13)
# python3 may become another version with the next upgrade of the distribution; python3.11 does not.
EXECUTABLE = os.path.realpath(sys.executable)


def has_pgo() -> bool:
    """Whether the interpreter was built with profile-guided optimization."""
    configured = str(sysconfig.get_config_var("CONFIG_ARGS")).replace("'", "").split()
    if "--enable-optimizations" in configured:
        return True
    # Debian and Ubuntu use PGO by rules of their own; the configuration does not show it.
    return "--disable-optimizations" not in configured and is_packaged()


def is_packaged() -> bool:
    """Whether the interpreter belongs to a package of the Linux distribution."""
    if sys.base_prefix != "/usr":
        return False
    if os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")):
        return True
    # Distributions from before that marker, such as Ubuntu 22.04.
    return succeeds("dpkg", "-S", EXECUTABLE) or succeeds("rpm", "-qf", EXECUTABLE)


def has_headers() -> bool:
    """Whether C and C++ can be compiled against the interpreter, as torch.compile does."""
    return os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))


def succeeds(*command: str) -> bool:
    """Whether a command is there and exits with status 0."""
    try:
        ended = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - constants
        return ended.returncode == 0
    except OSError:
        return False


def main() -> None:
    """Print the line."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        sys.exit(1)
    pgo, headers = has_pgo(), has_headers()
    # Without headers engines may not start, without PGO they are slower.
    rank = 2 * (not headers) + (not pgo)
    version = ".".join(map(str, sys.version_info[:3]))
    traits = f"built with{'' if pgo else 'out'} PGO"
    if not headers:
        traits += ", without Python.h, which torch.compile needs"
    print(rank, EXECUTABLE, version, traits, sep="\t")


if __name__ == "__main__":
    main()
