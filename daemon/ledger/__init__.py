"""The SQLite file that knows every image and holds every result."""
