"""Timers on a busy event loop. Standard library only."""

# A loop that was not scheduled for a while runs its late timers before it reads its sockets. The
# other side is not blamed for a timeout before what it sent meanwhile has been read: one turn of
# the loop later.
ONE_TURN_S = 0.01
