"""Describes the interpreter that runs this file, for deploy/interpreters.sh.

Prints rank, executable, version and traits, separated by tabs; the lowest rank is best. Exits with
status 1 if the gateway does not support the version of Python.
"""

import os
import subprocess
import sys
import sysconfig

OLDEST, NEWEST = (3, 11), (3, 13)
# An upgrade of the distribution may change the version of python3, but not of python3.11.
EXECUTABLE = os.path.realpath(sys.executable)


def has_pgo() -> bool:
    """Return whether the interpreter was built with profile-guided optimization."""
    configured = str(sysconfig.get_config_var("CONFIG_ARGS")).replace("'", "").split()
    if "--enable-optimizations" in configured:
        return True
    # Debian and Ubuntu enable PGO in their build rules, which the configuration does not show.
    return "--disable-optimizations" not in configured and is_packaged()


def is_packaged() -> bool:
    """Return whether the interpreter belongs to a package of the Linux distribution."""
    if sys.base_prefix != "/usr":
        return False
    if os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")):
        return True
    # Older distributions, such as Ubuntu 22.04, do not have that marker.
    return succeeds("dpkg", "-S", EXECUTABLE) or succeeds("rpm", "-qf", EXECUTABLE)


def has_headers() -> bool:
    """Return whether C and C++ can be compiled against the interpreter, as torch.compile does."""
    return os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))


def succeeds(*command: str) -> bool:
    """Return whether a command exists and exits with status 0."""
    try:
        ended = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - constants
        return ended.returncode == 0
    except OSError:
        return False


def main() -> None:
    """Print the description."""
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
