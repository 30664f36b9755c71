"""Timers on a busy event loop. Standard library only."""

# A loop that was not scheduled for a while runs its late timers before it reads its sockets. So a
# timeout counts only after one more iteration, in which the bytes that arrived meanwhile are read.
LOOP_GRACE_S = 0.01
