"""Run as a script: drop privileges, tie this process to its parent's life, become a PostgreSQL program.

    python -I postgres_child.py PARENT UID GID PROGRAM ARGUMENT...

UID -1 keeps the user. The order matters: the kernel forgets the parent-death signal when the user changes,
and keeps it over exec. A `preexec_fn` could do the same, but runs Python between fork and exec of a
process with threads. The signal is SIGINT, PostgreSQL's fast shutdown: clients are cut off, data is flushed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, uid, gid, program, *arguments = argv
    os.umask(0o077)
    os.chdir("/")  # the caller's folder may be closed to UID
    if uid != "-1":
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != int(parent):
            sys.exit("the parent died first")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
