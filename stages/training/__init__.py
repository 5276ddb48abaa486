"""How the small models inside the package are made. Never imported by the daemon or its workers."""
