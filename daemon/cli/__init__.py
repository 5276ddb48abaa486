"""Entry point of the command `visiond`: what must happen before anything else is imported.

First, the search path. With `python -m daemon` the working directory is on it, and that may be an inbox.
Until it is removed, this module imports only what Python has imported already, not even __future__. What
Python itself imports before that also comes from there; `visiond` and `python -P -m daemon` do not have that
folder on the path at all. Second, the signal handlers.
"""

import os
import sys

LEAVE_SECONDS = 2.0  # for threads to end


def main(*, by_module: bool = False) -> None:
    """Run `visiond` with the arguments of this process. by_module: started by `python -m`."""
    forget_working_directory(by_module=by_module)
    from daemon.system.signals import INTERRUPTED, leave_at_once, leaving_on_interrupt

    if sys.argv[1:2] == ["run"]:
        leave_at_once(once="--once" in sys.argv)
    with leaving_on_interrupt():
        from stages.contract.processes import importing

        with importing():
            from daemon.cli.commands import main as run_command

    try:
        run_command()
    except KeyboardInterrupt:  # before or after the command itself
        leave_threads(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except SystemExit as ending:
        leave_threads(int(ending.code or 0))
        raise


def leave_threads(status: int) -> None:
    """End the process even if a thread hangs in a system call, for example on a dead mount."""
    import threading
    import time

    deadline = time.monotonic() + LEAVE_SECONDS
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forget_working_directory(*, by_module: bool) -> None:
    """Remove the working directory and all relative folders
    from the search path of this process and its children."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [*filter(os.path.isabs, entries)]
    doubtful = {""}
    try:
        if entries != [""]:  # an empty entry among others means the working directory
            doubtful.update(map(os.path.abspath, {*entries}.difference(absolute)))
        if by_module and not sys.flags.safe_path:
            doubtful.add(os.getcwd())
    except FileNotFoundError:  # the working directory has been removed
        pass
    sys.path[:] = [folder for folder in sys.path if folder in absolute or folder not in doubtful]
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    if root not in sys.path:  # a checkout that is not installed
        sys.path.append(root)
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
    os.environ["PYTHONSAFEPATH"] = "1"
