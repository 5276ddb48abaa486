"""From a file's bytes to pixels: headers, limits, and the children that decode what may be hostile."""
