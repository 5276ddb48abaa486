"""The SQLite file that knows every image and stores every result."""
