"""`visiond tune`: measures which settings are the fastest on this machine."""
