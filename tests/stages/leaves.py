"""A plug-in that ends the process which imports it."""

import sys

sys.exit(3)
