"""Installs visiond as a system service. It uses only the standard library, so that
`python3 -m daemon.installing` works in a fresh checkout, and from inside a wheel.
"""
