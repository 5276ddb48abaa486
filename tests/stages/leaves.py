"""A plug-in that ends the process that imports it."""

import sys

sys.exit(3)
