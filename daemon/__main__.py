"""The command `visiond`, and `python -m daemon`.

Until `main` has put the search path right, it imports nothing that Python has not imported already. With `python -m daemon` the
working directory is first on the path, and it may be an inbox. What Python itself imports before that comes from there too:
`visiond` and `python -P -m daemon` do not have that folder on the path at all.
"""

import os
import sys


def main() -> None:
    forget_working_directory(by_module=__name__ == "__main__")
    from daemon.cli import main as run

    run()


def forget_working_directory(*, by_module: bool) -> None:
    """Take the working directory, and what is relative to it, from the search path of this process and of those that it starts.
    by_module: `python -m` has put it there."""
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


if __name__ == "__main__":
    main()
