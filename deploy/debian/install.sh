#!/bin/sh
# Installs or upgrades the service, with packages from a package index. Takes the options of `visiond install`.
exec env PYTHONPATH="$(echo /usr/share/visiond/visiond-*.whl)" PYTHONDONTWRITEBYTECODE=1 python3 -m daemon.installing install --upgrade "$@"
