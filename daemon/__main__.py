"""`python -m daemon` is `visiond`."""

from daemon.cli import main

main(by_module=True)
