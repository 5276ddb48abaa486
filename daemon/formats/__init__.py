"""Files that other programs read: data sets for training, tasks of annotation tools, pages with text."""
