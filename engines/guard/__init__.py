"""Ensures that no process of an engine outlives its gateway. Standard library only.

`guardian` (a script) is the parent of an engine's processes; `guardian_client` starts, finds and
controls one. `marked_processes` finds and kills processes by a variable in their environment, for
engines inside the gateway, and `detach` (a script) runs their workers. `process_tree` reads /proc,
`scratch` makes an engine's temporary directory, `directories` refuses those of other users.
`container_run` (a script) runs an engine in a container, `containers` finds and removes those that
an engine left, both by `docker_api`.

Other packages import these modules, not names from here: the scripts import this package too, and
asyncio alone would add 8 MiB to the 14 of every guardian.
"""

__all__ = [
    "containers",
    "directories",
    "docker_api",
    "guardian_client",
    "marked_processes",
    "process_tree",
    "scratch",
]
