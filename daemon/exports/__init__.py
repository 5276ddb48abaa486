"""Files that other programs read: tables, data sets for training, tasks of annotation tools, pages with text."""
