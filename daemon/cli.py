"""Entry of the command `visiond`: what has to be right before anything else is imported.

The search path comes first. With `python -m daemon` the working directory is on it, and that may be an inbox; until it is taken
off, nothing is imported that Python has not imported already, not even __future__. What Python itself imports before that
comes from there too: `visiond` and `python -P -m daemon` do not have that folder on the path at all. Then an order to stop
is obeyed.
"""

import os
import sys


def main(*, by_module: bool = False) -> None:
    """Be `visiond` with this process's arguments. by_module: started by `python -m`."""
    forget_working_directory(by_module=by_module)
    if sys.argv[1:2] == ["run"]:
        from daemon.signals import leave_at_once

        leave_at_once(once="--once" in sys.argv)
    from daemon.commands import main as run_command

    run_command()


def forget_working_directory(*, by_module: bool) -> None:
    """Take the working directory, and what is relative to it, off the search path of this process and of all that it starts."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [entry for entry in entries if os.path.isabs(entry)]
    doubtful = {""}
    try:
        if entries != [""]:  # an empty entry among others means the working directory
            doubtful |= {os.path.abspath(entry) for entry in entries if entry not in absolute}
        if by_module and not sys.flags.safe_path:
            doubtful.add(os.getcwd())
    except FileNotFoundError:  # the working directory has been removed
        pass
    sys.path[:] = [folder for folder in sys.path if folder in absolute or folder not in doubtful]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root not in sys.path:  # a checkout that is not installed
        sys.path.append(root)
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
    os.environ["PYTHONSAFEPATH"] = "1"
